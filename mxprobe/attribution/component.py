"""Which component of the rounding error, and in which operands (science, section 8.5).

Shares are of the GEMM-output error, because a tensor's error hides what an outlier does: it carries the energy
that the error is divided by. The order matters:

    deadzone     when the error made on realised-zeroed elements (Q = 0, x != 0) is >= half of the whole,
    saturation   else when the error made on |x| > 6 s is,
    scale, grid  else the larger of the two by remainder split, when >= half,
    mixed        else.

Operands are weighted by the KL that their error is predicted to make (Delta2) where it was measured and replays say
that the prediction holds, and by their output error relative to the output where not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mxprobe.schema import Component, Role

from .measured import FORWARD_ROLES, Array, OperandSums, divide
from .ratios import SHARES, output_parts
from .recommendation import OperandGroup
from .thresholds import Thresholds

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class OperandErrors:
    """Output errors [M, R] relative to the output, and parts of them, averaged over clusters."""

    error: Array
    parts: dict[str, Array]
    """`zeroed`, `saturated`, and the remainder split `scale`, `deadzone`, `grid`."""
    importance: Array
    """Delta2 per unit of relative output error; 1 throughout where no sensitivity was measured."""

    def shares(self, mask: Mask) -> dict[str, float]:
        """Return the shares of the masked operands' summed error, weighted by importance; NaN when they have none."""
        weight = self.importance[mask]
        total = float(np.nansum(weight * self.error[mask]))
        if total <= 0:
            return dict.fromkeys(SHARES, float("nan"))
        return {name: float(np.nansum(weight * self.parts[name][mask])) / total for name in SHARES}

    def size(self, mask: Mask) -> float:
        """Return the mean over the masked operands of what they are weighted by."""
        return float(np.nanmean((self.importance * self.error)[mask]))


def name_component(shares: Mapping[str, float], thresholds: Thresholds) -> Component:
    """Return what the rule above names, from shares called `zeroed`, `saturated`, `scale`, `grid`.

    NaN names nothing.
    """
    enough = thresholds.component_share
    if shares["zeroed"] >= enough:
        return Component.DEADZONE
    if shares["saturated"] >= enough:
        return Component.SATURATION
    larger = Component.SCALE if shares["scale"] >= shares["grid"] else Component.GRID
    if shares[larger.value] >= enough:
        return larger
    return Component.NONE if np.isnan(shares["scale"]) else Component.MIXED


def operand_errors(operands: OperandSums, weights: Array) -> OperandErrors:
    """Add over clusters, then divide, per module and role."""
    sums = {name: np.tensordot(weights, values, axes=(0, 0)) for name, values in operands.base.items()}
    ref2 = sums["out_ref2"]
    error = divide(sums["out_e2"], ref2)
    relative = {name: divide(part, ref2) for name, part in output_parts(sums).items()}
    return OperandErrors(error, relative, _importance(operands.delta2, error))


def _importance(delta2: Array | None, error: Array) -> Array:
    """Return importances [M, R].

    An operand without a sensitivity of its own (a fused head) counts like the median one.
    """
    if delta2 is None:
        return np.ones_like(error)
    ratio = divide(delta2, error)
    known = ratio[np.isfinite(ratio)]
    if not known.size:
        return np.ones_like(error)
    return np.where(np.isfinite(ratio), ratio, np.median(known))


def groups(
    errors: OperandErrors, modules: tuple[str, ...], mask: Mask, thresholds: Thresholds
) -> list[tuple[OperandGroup, Mask]]:
    """Return the masked operands by role and kind of module (the last part of its name), in the model's order."""
    kinds = np.array([kind_of(name) for name in modules])
    found: list[tuple[OperandGroup, Mask]] = []
    for column, role in enumerate(FORWARD_ROLES):
        for kind in dict.fromkeys(kinds.tolist()):
            members = np.zeros_like(mask)
            members[:, column] = (kinds == kind) & mask[:, column] & np.isfinite(errors.error[:, column])
            if members.any():
                found.append((_group(errors, modules, members, role, kind, thresholds), members))
    return found


def kind_of(module: str) -> str:
    """Return `up_proj` for `model.layers.3.mlp.up_proj`; `net.2` stays whole, for an index alone says nothing."""
    parts = module.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def where(
    found: list[tuple[OperandGroup, Mask]], errors: OperandErrors, component: Component, thresholds: Thresholds
) -> list[tuple[OperandGroup, Mask]]:
    """Return the groups to name: of the named component, with a fifth of the largest such group's error or more.

    A mixed whole names all groups of that size, each with its own component; so does a whole whose component no
    group has on its own.
    """
    alike = [item for item in found if item[0].component is component] or found
    sizes = [errors.size(members) for _, members in alike]
    largest = max(sizes, default=0.0)
    return [item for item, size in zip(alike, sizes, strict=True) if size >= thresholds.where_error_frac * largest]


def _group(
    errors: OperandErrors,
    modules: tuple[str, ...],
    members: Mask,
    role: Role,
    kind: str,
    thresholds: Thresholds,
) -> OperandGroup:
    rows = np.flatnonzero(members.any(axis=1))
    shares = errors.shares(members)
    return OperandGroup(
        role=role,
        module_kind=kind,
        modules=tuple(modules[row] for row in rows),
        output_error=float(np.nanmean(errors.error[members])),
        component=name_component(shares, thresholds),
        shares=shares,
    )
