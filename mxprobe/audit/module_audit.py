"""Per module and side: quantized or not, by which format and rule, exactly or not, with whose weights.

Everything is told from values: x, W and y of the calls that the probe saw. No configuration is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from mxprobe.attribution.token_mismatch import modules_behind
from mxprobe.schema import Phase
from mxprobe.trace import Trace
from mxprobe_kernels.recipe_grammar import NONE

EXACT_SHARE = 0.9
"""Part of a side's rows that one recipe must reproduce exactly for the side to be called exact."""
UNEXPLAINED_ERROR = 1e-4
"""Output error, as energy, that is more than 16-bit arithmetic makes."""


@dataclass(frozen=True)
class SideAudit:
    """One module in one phase."""

    recipe_x: str
    recipe_w: str
    exact: bool
    """The recipe reproduces y: else it is only the closest one known."""
    error: float
    """Realised output error, ||y - x W^T||^2 / ||x W^T||^2."""
    n_rows: int
    """Rows of table `outputs`."""
    weight_lag: int | None
    """Steps behind the trainer, 0 for its current weights; None where it is not known. Of the rollout."""

    @property
    def quantized(self) -> bool:
        """Whether a known quantizer reproduces the outputs. Nothing is claimed of outputs that none reproduces."""
        return self.exact and self.recipe != (NONE, NONE)

    @property
    def unexplained(self) -> bool:
        """Whether outputs are far from high precision and no recipe reproduces them with current weights."""
        return not self.exact and self.error > UNEXPLAINED_ERROR

    @property
    def recipe(self) -> tuple[str, str]:
        return self.recipe_x, self.recipe_w

    @property
    def words(self) -> str:
        """Return `mxfp4 rceil`, `x none, W mxfp4 rceil`, `high precision`, `not known`."""
        if not self.exact and self.weight_lag:
            return "known, old weights"
        if not self.exact:
            return "not known" if self.unexplained else "high precision"
        if self.recipe == (NONE, NONE):
            return "high precision"
        x, w = (side.replace("+", " ") for side in self.recipe)
        return x if x == w else f"x {x}, W {w}"


@dataclass(frozen=True)
class ModuleAudit:
    module: str
    class_name: str
    dtype: str
    status: str
    """As in table `modules`: probed, not_called, ..."""
    train: SideAudit | None
    rollout: SideAudit | None
    evaluation: SideAudit | None
    zero_gradient: bool
    """Its output got no gradient at any probed step, or one of exact zeros, while other modules had one."""

    @property
    def kind(self) -> str:
        """Return the last part of the name: `q_proj`."""
        return self.module.rpartition(".")[2]

    @property
    def sides(self) -> tuple[SideAudit, ...]:
        """Return training and rollout, as far as they were seen."""
        return tuple(side for side in (self.train, self.rollout) if side is not None)


def module_audits(trace: Trace) -> tuple[ModuleAudit, ...]:
    """Return all modules of a trace that hold a weight GEMM, in the order of table `modules`."""
    outputs = trace.outputs()
    behind = {each.module: each.lag for each in modules_behind(outputs)}
    sides = {
        (str(module), str(phase)): _side(rows, behind.get(str(module)))
        for (module, phase), rows in outputs.groupby(["module", "phase"], observed=True, sort=False)
    }
    silent = _zero_gradients(trace)
    modules = trace.modules().drop_duplicates("module", keep="last")
    about = {str(row["module"]): row for row in modules.to_dict("records")}
    names = dict.fromkeys([*about, *(module for module, _ in sides)])
    return tuple(
        ModuleAudit(
            module=name,
            class_name=str(about.get(name, {}).get("class_name", "")),
            dtype=str(about.get(name, {}).get("dtype", "")),
            status=str(about.get(name, {}).get("status", "probed")),
            train=sides.get((name, Phase.TRAIN.value)),
            rollout=sides.get((name, Phase.ROLLOUT.value)),
            evaluation=sides.get((name, Phase.EVAL.value)),
            zero_gradient=name in silent,
        )
        for name in names
    )


def _side(rows: pd.DataFrame, behind: int | None) -> SideAudit:
    exact = (rows["exact"] == True).to_numpy(dtype=bool)  # noqa: E712  a column with missing values is of objects
    votes: dict[tuple[str, str], tuple[int, int]] = {}
    for x, w, is_exact in zip(rows["recipe_x"].astype(str), rows["recipe_w"].astype(str), exact, strict=True):
        n_exact, n = votes.get((x, w), (0, 0))
        votes[x, w] = (n_exact + int(is_exact), n + 1)
    recipe = max(votes, key=votes.__getitem__)
    known = rows["weight_lag"].dropna()
    current = 0 if len(known) and (known == 0).all() else None
    ref2 = float(rows["ref2"].sum())
    return SideAudit(
        recipe_x=recipe[0],
        recipe_w=recipe[1],
        exact=votes[recipe][0] >= EXACT_SHARE * len(rows),
        error=float(rows["realised2"].sum()) / ref2 if ref2 > 0 else float("nan"),
        n_rows=len(rows),
        weight_lag=behind if behind is not None else current,
    )


def _zero_gradients(trace: Trace) -> set[str]:
    rows = trace.table("tensors", ("module", "role", "phase", "sum_x2"))
    rows = rows[rows["phase"] == Phase.TRAIN.value]
    energy: dict[str, float] = dict.fromkeys(rows["module"].astype(str), 0.0)
    gradients = rows[rows["role"] == "g_dgrad"]
    for module, value in zip(gradients["module"].astype(str), gradients["sum_x2"].to_numpy(dtype=float), strict=True):
        energy[module] += value
    return {module for module, value in energy.items() if value == 0.0} if any(energy.values()) else set()
