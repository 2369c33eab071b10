"""Can two runs be compared, on which modules, and over which steps?"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mxprobe.errors import UsageError
from mxprobe.trace import Trace

MIN_COMMON_STEPS = 8
_UNITS = {"step": "steps", "tokens": "tokens"}
_SHOWN = 3


@dataclass(frozen=True)
class Steps:
    """A range of steps, both ends included."""

    first: int
    last: int

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["step"].between(self.first, self.last)]

    def of(self, by_step: pd.Series) -> pd.Series:
        """Return the part of a series indexed by step that lies in the range."""
        return by_step[(by_step.index >= self.first) & (by_step.index <= self.last)]

    @property
    def words(self) -> str:
        return f"{self.first} to {self.last}"

    @property
    def last_quarter(self) -> "Steps":
        return Steps(self.last - (self.last - self.first) // 4, self.last)


@dataclass(frozen=True)
class Alignment:
    """What both runs have. `a` and `b` are the same steps unless the runs do not overlap."""

    modules: tuple[str, ...]
    phases: tuple[str, ...]
    a: Steps
    b: Steps
    warnings: tuple[str, ...]
    axis: str = "step"
    """What `a` and `b` count: `step` or `tokens`."""

    @property
    def unit(self) -> str:
        return _UNITS[self.axis]

    @property
    def words(self) -> str:
        """`aligned by step, 1 to 240`."""
        if self.is_aligned:
            return f"aligned by {self.axis}, {self.a.words}"
        return f"each over its own {self.unit}, A {self.a.words}, B {self.b.words}"

    @property
    def is_aligned(self) -> bool:
        return self.a == self.b


def align(a: Trace, b: Trace) -> Alignment:
    """Return the modules of one name and shape, the phases and the steps that both traces hold.

    Raises:
        UsageError: nothing was probed in one of them, no module or no phase in common, or every common module has
            another shape.
    """
    modules, warnings = _common_modules(a, b)
    phases = _common_phases(a, b)
    steps_a, steps_b, more = _common_steps(a, b)
    warnings += more
    for name in ("format", "rule"):
        values = [str(trace.run.get("config", {}).get(name, "unknown")) for trace in (a, b)]
        if values[0] != values[1]:
            warnings.append(
                f"Errors of tensors were measured for another {name} ({values[0]} in A, {values[1]} in B): changes of "
                "NMSE and output error include that."
            )
    for label, trace in (("A", a), ("B", b)):
        warnings += [f"{label}: {problem}" for problem in trace.problems]
    return Alignment(modules, phases, steps_a, steps_b, tuple(warnings), a.axis)


def _common_modules(a: Trace, b: Trace) -> tuple[tuple[str, ...], list[str]]:
    seen = [_measured_modules(trace) for trace in (a, b)]
    for label, names, trace in zip("AB", seen, (a, b), strict=True):
        if not names:
            raise UsageError(
                f"{label} ({trace.directory}) has no measured module",
                cause="it was detached before a step was probed, or no layer was selected",
                remedy="compare traces of runs that were probed for a while",
            )
    common = [name for name in seen[0] if name in set(seen[1])]
    if not common:
        raise UsageError(
            "the runs cannot be compared: no module is in both",
            cause=f"A has {_some(seen[0])}; B has {_some(seen[1])}: two models, or --layers chose differently",
            remedy="compare runs of one model, attached with the same --layers",
        )
    shapes = [_shapes(trace) for trace in (a, b)]
    other = [name for name in common if name in shapes[0] and shapes[0][name] != shapes[1].get(name, shapes[0][name])]
    if len(other) == len(common):
        name = other[0]
        raise UsageError(
            "the runs cannot be compared: the models have different shapes",
            cause=f"{name} is {shapes[0][name]} in A and {shapes[1][name]} in B, and so on for all {len(other)}",
            remedy="compare runs of one model",
        )
    warnings: list[str] = []
    if other:
        warnings.append(f"{len(other)} modules have another shape in B and are left out: {_some(other)}.")
    only = [[name for name in names if name not in set(common)] for names in seen]
    for label, names in zip("AB", only, strict=True):
        if names:
            warnings.append(f"{len(names)} modules were measured in {label} alone and are left out: {_some(names)}.")
    return tuple(name for name in common if name not in set(other)), warnings


def _measured_modules(trace: Trace) -> list[str]:
    names = pd.concat([trace.table(name, ("module",))["module"].astype(str) for name in ("tensors", "outputs")])
    return list(dict.fromkeys(names))


def _shapes(trace: Trace) -> dict[str, tuple[int, ...]]:
    rows = trace.modules()
    return {
        str(row.module): tuple(int(size) for size in row.shape)
        for row in rows.itertuples()
        if isinstance(row.shape, np.ndarray) and row.shape.size
    }


def _common_phases(a: Trace, b: Trace) -> tuple[str, ...]:
    seen = [
        {str(phase) for name in ("tensors", "outputs") for phase in trace.table(name, ("phase",))["phase"].unique()}
        for trace in (a, b)
    ]
    common = sorted(seen[0] & seen[1])
    if not common:
        raise UsageError(
            "the runs cannot be compared: no phase was measured in both",
            cause=f"A has {', '.join(sorted(seen[0]))}; B has {', '.join(sorted(seen[1]))}",
            remedy="attach to the same kind of process, trainer or rollout, in both",
        )
    return tuple(common)


def _common_steps(a: Trace, b: Trace) -> tuple[Steps, Steps, list[str]]:
    ranges = [_steps_of(trace) for trace in (a, b)]
    first, last = max(each.first for each in ranges), min(each.last for each in ranges)
    if last - first + 1 < MIN_COMMON_STEPS:
        said = (
            f"The runs share fewer than {MIN_COMMON_STEPS} {_UNITS[a.axis]} (A {ranges[0].words}, B "
            f"{ranges[1].words}), "
            "so each is taken over its own: what changed includes what training did meanwhile."
        )
        return ranges[0], ranges[1], [said]
    longest = max(each.last - each.first + 1 for each in ranges)
    warnings: list[str] = []
    if last - first + 1 < longest / 2:
        warnings.append(f"Only {_UNITS[a.axis]} {first} to {last} are in both, less than half of the longer run.")
    return Steps(first, last), Steps(first, last), warnings


def _steps_of(trace: Trace) -> Steps:
    steps = pd.concat([trace.table(name, ("step",))["step"] for name in ("outputs", "tensors", "signals")]).dropna()
    return Steps(int(steps.min()), int(steps.max()))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
