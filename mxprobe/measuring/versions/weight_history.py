"""Which version of the trainer's weights does generation compute with? Judged from x and y, whatever the engine hides.

    residual_v = ||y - b_v - Qx(x) Qw(W_v)^T||^2        v: the versions kept, the current one among them

on the watched output features F of each module. A version fits when some recipe brings its residual to 1e-5 of
||x W_v^T||^2 or less. Kept are the last `KEPT` versions, taken at probed steps and the `RECENT` steps before each, and
for ever the first one seen: a rollout whose weights were never refreshed since attach stays recognisable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import mxprobe_kernels
from mxprobe.events import WEIGHT_SYNC, Event
from mxprobe.measuring.engines.hashed_stacks import HashedStack
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.operands.snapshot import Snapshot, event_now
from mxprobe.measuring.operands.weights import sample_watched
from mxprobe.measuring.recipes import EXACT_FRAC, RULES, Call, Recipe, candidates, orders, quantize
from mxprobe.measuring.versions.weight_noise import Change, NoiseState, change
from mxprobe.schema import Phase
from mxprobe_kernels.recipe_grammar import NONE, Operand

KEPT = 8
RECENT = 4
"""Steps before a probed one whose weights are kept too: lags of so many steps are told one by one."""
SHARPER = 1e-2
"""Where current weights fit and a kept version fits so many times better (and to within 1e-9), that one is used:
between neighbouring steps of a small learning rate the weights differ by less than 1e-5."""
_SHARP_FRAC = 1e-9
_PROBE_ROWS = 16
_UNKNOWN = "unknown"
_STATES = {"behind_first": "behind", "reordered": _UNKNOWN, "transposed": _UNKNOWN}
"""State told -> state of the module, where these differ: going from one to the other is no news."""


class Version(NamedTuple):
    """One module's watched weights as of a step: those its forward pass computes with."""

    step: int
    """Steps since attach, counting the one being computed."""
    weight: torch.Tensor
    """[F, K]"""
    bias: torch.Tensor | None
    """[F]"""


class Copies(NamedTuple):
    """The versions of one step on one device, copied in the training thread."""

    versions: dict[str, Version]
    device: torch.device
    ready: Any
    """CUDA event after which they hold their values; None on the CPU."""
    out_features: Mapping[str, int] = {}
    """Output features of the whole weights, by module, where their rows are to be hashed."""
    stacks: Sequence[HashedStack] = ()
    """Rows of fused experts, to be hashed and not kept."""


class Finding(NamedTuple):
    weight_lag: int | None
    """Steps behind the trainer, 0 for its current weights; None where it cannot be told."""
    event: Event | None
    """News of the module's weights; None where there is none."""


class Fit(NamedTuple):
    version: int
    """Its index in the list of versions."""
    recipe: Recipe
    residual_frac: float


def copy_versions(step: int, modules: Mapping[str, nn.Module]) -> list[Copies]:
    """Copy the current weights of the watched features; at a step boundary, in the training thread, without waiting."""
    by_device: dict[torch.device, dict[str, Version]] = {}
    for name, module in modules.items():
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with undisturbed(device.type):
            watched = sample_watched(module)
            if watched is not None:
                by_device.setdefault(device, {})[name] = Version(step, *watched)
    sizes = {name: m.out_features for name, m in modules.items() if isinstance(m, nn.Linear)}
    return [Copies(versions, device, event_now(device), sizes) for device, versions in by_device.items()]


def codes_word(w: torch.Tensor) -> str:
    """Hash the MXFP4 codes and scales (`rceil`, row blocks) of W [F, K] with `code_hash`, in hexadecimal."""
    return f"{int(mxprobe_kernels.code_hash(w)) % 2**64:016x}"


class WeightHistory:
    """Versions of each module and what generation was found to use. Called by the worker only."""

    def __init__(self) -> None:
        self.generates = False
        """A rollout was measured in this process."""
        self._first: dict[str, Version] = {}
        self._recent: dict[str, list[Version]] = {}
        self._state: dict[str, str] = {}
        self._recipe: dict[str, Recipe] = {}
        self.noise = NoiseState()

    def keep(self, copies: Copies) -> None:
        """Add the versions of a step, once they hold their values."""
        for name, version in copies.versions.items():
            bias = None if version.bias is None else version.bias.cpu()
            held = Version(version.step, version.weight.cpu(), bias)
            self._first.setdefault(name, held)
            recent = self._recent.setdefault(name, [])
            recent.append(held)
            del recent[:-KEPT]

    def versions(self, name: str) -> list[Version]:
        """Return the versions kept of a module, the newest first, the first one seen last."""
        recent = self._recent.get(name, [])[::-1]
        first = self._first.get(name)
        return recent if first is None or any(v.step == first.step for v in recent) else [*recent, first]

    def newest(self, name: str) -> list[Version]:
        """Return the last version of a module and of the steps right before it: at most three, oldest first."""
        recent = self._recent.get(name, [])[-3:]
        last = recent[-1].step if recent else 0
        return [v for i, v in enumerate(recent) if last - v.step == len(recent) - 1 - i]

    def change(self, snapshot: Snapshot) -> Change | None:
        """Say how the weights of a snapshot differ from those the optimizer left before its step."""
        for held in reversed(self._recent.get(snapshot.module, [])):
            if held.step == snapshot.step:
                return change(snapshot.weight.watched.cpu(), held.weight)
        return None

    def judge(self, snapshot: Snapshot, recipe: Recipe, *, exact: bool) -> Finding:
        """Judge whose weights the snapshot's output was computed with; `recipe` fits the current ones best.

        Training and evaluation are only asked whether they use the module's own weight.
        """
        if snapshot.phase != Phase.ROLLOUT.value:
            return Finding(0 if exact else None, None)
        versions = [_current(snapshot), *(v for v in self.versions(snapshot.module) if v.step < snapshot.step)]
        fit = self._fit(snapshot, versions, recipe, exact=exact)
        if fit is None:
            return Finding(None, self._unknown(snapshot, versions))
        self._recipe[snapshot.module] = fit.recipe
        used = versions[fit.version]
        lag = snapshot.step - used.step
        if lag == 0:
            return Finding(0, self._news(snapshot, "current"))
        is_first = used.step == self._first[snapshot.module].step
        codes = {"codes": codes_word(used.weight), "trainer_codes": codes_word(versions[0].weight)}
        state = "behind_first" if is_first else "behind"
        return Finding(lag, self._news(snapshot, state, used_step=used.step, lag=lag, **codes))

    def _news(self, snapshot: Snapshot, state: str, **data: Any) -> Event | None:
        """Return the event of a module that has changed its state; current weights are news only afterwards."""
        before = self._state.get(snapshot.module, "current")
        self._state[snapshot.module] = _STATES.get(state, state)
        return None if self._state[snapshot.module] == before else Event(WEIGHT_SYNC, snapshot.module, state, data)

    def _fit(self, snapshot: Snapshot, versions: list[Version], recipe: Recipe, *, exact: bool) -> Fit | None:
        stack = _Stack(snapshot, versions)
        if not exact:
            known = self._recipe.get(snapshot.module)
            likely = [r for r in (known, recipe) if r is not None]
            return stack.find(likely, thorough=self._state.get(snapshot.module) != _UNKNOWN)
        fits = stack.fits(recipe)
        current, best = fits[0], min(fits)
        if best <= _SHARP_FRAC and best < SHARPER * current:
            return Fit(fits.index(best), recipe, best)
        return Fit(0, recipe, current)

    def _unknown(self, snapshot: Snapshot, versions: list[Version]) -> Event | None:
        """Return the event of a module whose weights no version explains; None if told, or while none is kept."""
        steps = [v.step for v in versions[1:]]
        if self._state.get(snapshot.module) == _UNKNOWN:
            return None
        if _is_reordered(snapshot):
            return self._news(snapshot, "reordered")
        if _is_transposed(snapshot):
            return self._news(snapshot, "transposed")
        if not steps:
            return None
        closest = versions[_Stack(snapshot, versions).closest()].step
        span = {"n_versions": len(steps), "first_step": min(steps), "last_step": max(steps)}
        return self._news(snapshot, _UNKNOWN, **span, closest_step=closest)


def _current(snapshot: Snapshot) -> Version:
    weight, bias = snapshot.weight.watched, snapshot.weight.watched_bias
    return Version(snapshot.step, weight.cpu(), None if bias is None else bias.cpu())


class _Stack:
    """All versions of a module's watched weights as one matrix [V F, K], so that each recipe is tried once."""

    def __init__(self, snapshot: Snapshot, versions: list[Version]) -> None:
        assert snapshot.y is not None  # only outputs that are visible are judged
        assert snapshot.y_watched is not None
        self._n = len(versions)
        self._x = snapshot.x.cpu()
        self._w = torch.cat([v.weight for v in versions])
        y = snapshot.y_watched.cpu().double()
        self._y = torch.stack([y if v.bias is None else y - v.bias.double() for v in versions], 1)
        """[R, V, F]"""
        self._orders = list(orders(Call(self._x, self._w, self._y, snapshot.y.dtype)))

    def find(self, first: list[Recipe], *, thorough: bool) -> Fit | None:
        """Return the version and recipe that fit to 1e-5, of several the newest. Not thorough: by plain rules only."""
        others = candidates(None) if thorough else ((NONE, NONE), *((rule, rule) for rule in RULES))
        for recipe in dict.fromkeys((*first, *others)):
            if any(Operand.parse(side).needs_whole_tensor for side in recipe):
                continue  # its tensor scale is that of the whole W, which is not kept
            if min(self.fits(recipe, _PROBE_ROWS)) <= EXACT_FRAC:
                fits = self.fits(recipe)
                for index, residual_frac in enumerate(fits):
                    if residual_frac <= EXACT_FRAC and residual_frac <= min(fits) / SHARPER + _SHARP_FRAC:
                        return Fit(index, recipe, residual_frac)
        return None

    def closest(self) -> int:
        """Return the index of the version with the least residual under the plain recipes."""
        names = (NONE, RULES[0])
        totals = [self.fits((x, w)) for x in names for w in names]
        best = min(totals, key=min)
        return best.index(min(best))

    def fits(self, recipe: Recipe, rows: int | None = None) -> list[float]:
        """Return each version's residual relative to the exact product; over the orders of rounding, the best."""
        y = self._y[:rows]
        per_order = [self._residuals(each.pair(recipe, rows, None), y) for each in self._orders]
        return [min(values) for values in zip(*per_order)]

    def _residuals(self, pair: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> list[float]:
        qx, qw = pair
        product = (qx @ qw.T).reshape(y.shape)
        exact = (self._x[: y.shape[0]].double() @ self._w.double().T).reshape(y.shape)
        ref2 = exact.square().sum((0, 2)).clamp(min=torch.finfo(torch.float64).tiny)
        return ((y - product).square().sum((0, 2)) / ref2).nan_to_num(nan=float("inf")).tolist()


def _plain_products(snapshot: Snapshot, w: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield float64 [R, O]: x W^T untouched and under each MXFP4 rule."""
    x = snapshot.x.double()
    for name in (NONE, *RULES):
        yield quantize(x, name).double() @ quantize(w.double(), name).double().T


def _is_reordered(snapshot: Snapshot) -> bool:
    """Say whether each watched output is that of some other sampled feature of the current W."""
    y = _without_bias(snapshot)
    for product in _plain_products(snapshot, snapshot.weight.rows):
        distance2 = y.square().sum(0)[:, None] + product.square().sum(0) - 2 * y.T @ product
        if bool((distance2.min(1).values <= EXACT_FRAC * y.square().sum(0)).all()):
            return True
    return False


def _is_transposed(snapshot: Snapshot) -> bool:
    """Say whether y = x W for a square W that was copied whole."""
    w = snapshot.weight.rows
    if w.shape[0] != w.shape[1] or snapshot.weight.out_index is not None:
        return False
    y, index = _without_bias(snapshot), snapshot.weight.watched_index
    for product in _plain_products(snapshot, w.T.contiguous()):
        if float((y - product[:, index]).square().sum()) <= EXACT_FRAC * float(y.square().sum()):
            return True
    return False


def _without_bias(snapshot: Snapshot) -> torch.Tensor:
    assert snapshot.y_watched is not None  # only outputs that are visible are judged
    y, bias = snapshot.y_watched.double(), snapshot.weight.watched_bias
    return y if bias is None else y - bias.double()
