"""Which of the trainer's weights does an engine hold? From table `weight_codes` of both traces.

An engine's rows of a module are set against every version of the trainer's that was hashed, in every form: as it is and
rounded by each rule. All rows alike: the engine holds that version. The last rows of each module count, those of each
worker of the engine for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from mxprobe.agent.engines.forms import AS_HELD, NOT_COMPARABLE, TABLE, TRANSPOSED
from mxprobe.schema import Phase
from mxprobe.trace import Trace

from .pitfalls import PITFALLS, Finding

CURRENT, BEHIND, TURNED, FLIPPED, UNKNOWN = "current", "behind", "transposed", "flipped", "unknown"
BETWEEN = "between"
MOSTLY = 0.5
"""Share of a version's rows that must be alike for the others to be called flipped."""

_Versions = dict[str, list[tuple[int, int, str, dict[int, int]]]]
"""Module -> (step, time_ns, form, feature -> hash) of the trainer."""
_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeldVersion:
    """What an engine holds of one module."""

    module: str
    state: str
    """`current`, `behind`, `between`, `transposed`, `flipped`, `unknown` or `not comparable`."""
    detail: str
    lag: int | None = None
    """Steps behind what the trainer had when the engine's rows were taken; None where no version was recognised."""


def held_versions(trainer: Trace, rollout: Trace) -> tuple[HeldVersion, ...]:
    """Of every module that the engine's trace has rows of."""
    of_trainer = trainer.table(TABLE)
    versions, shapes = _versions(of_trainer), _shapes(of_trainer)
    rows = rollout.table(TABLE)
    rows = rows[rows["phase"].astype(str) == Phase.ROLLOUT.value]
    judged: dict[str, list[tuple[int, HeldVersion]]] = {}
    for rank in sorted(rows["rank"].unique().tolist()):
        for module, group in rows[rows["rank"] == rank].groupby("module", observed=True, sort=False):
            name = str(module)
            found = _judge(name, _last(group), versions.get(name, []), shapes.get(name))
            judged.setdefault(name, []).append((rank, found))
    return tuple(_not_kept([each for workers in judged.values() for each in _by_worker(workers)]))


def _by_worker(workers: list[tuple[int, HeldVersion]]) -> Iterator[HeldVersion]:
    """One for the module where all workers hold the same; else each, with its rank."""
    first = workers[0][1]
    if all(each == first for _, each in workers):
        yield first
        return
    for rank, each in workers:
        yield replace(each, module=f"{each.module} (rank {rank})")


def _not_kept(judged: list[HeldVersion]) -> Iterator[HeldVersion]:
    """Where few modules hold a version that was kept, the others are not torn but of a version in between."""
    n_exact = sum(each.state in (CURRENT, BEHIND) for each in judged)
    n_flipped = sum(each.state == FLIPPED for each in judged)
    for each in judged:
        if each.state == FLIPPED and n_flipped > n_exact:
            yield replace(each, state=BETWEEN, detail=f"holds a version between those kept: {each.detail}")
        else:
            yield each


def find_held(held: tuple[HeldVersion, ...]) -> tuple[Finding, ...]:
    """What is wrong with it, by pitfall; what cannot be compared is no finding."""
    comparable = [each for each in held if each.state != NOT_COMPARABLE]
    found: list[Finding] = []
    for state, slug in _PITFALLS.items():
        named = [each for each in comparable if each.state == state]
        if named and state == BEHIND and len(named) < len(comparable):
            slug = "partial_refit"
        if named:
            words = "; ".join(dict.fromkeys(f"{each.module} {each.detail}" for each in named[:_MAX_NAMED]))
            found.append(Finding(PITFALLS[slug], tuple(each.module for each in named), f"by its codes: {words}"))
    return tuple(found)


_PITFALLS = {
    BEHIND: "stale_weights",
    TURNED: "reordered_weights",
    FLIPPED: "flipped_weights",
    UNKNOWN: "unknown_weights",
}
_MAX_NAMED = 3


def _versions(rows: pd.DataFrame) -> _Versions:
    found: _Versions = {}
    for row in rows[rows["phase"].astype(str) == Phase.TRAIN.value].to_dict("records"):
        hashes = dict(zip(row["features"], row["hashes"], strict=True))
        version = int(row["step"]), int(row["time_ns"]), str(row["form"]), hashes
        found.setdefault(str(row["module"]), []).append(version)
    return found


def _shapes(rows: pd.DataFrame) -> _Shapes:
    rows = rows[rows["phase"].astype(str) == Phase.TRAIN.value].drop_duplicates("module")
    return {str(module): tuple(map(int, shape)) for module, shape in zip(rows["module"], rows["shape"], strict=True)}


def _last(group: pd.DataFrame) -> dict[str, dict[Any, Any]]:
    """Form -> its row, of the newest step of the module."""
    newest = group[group["step"] == group["step"].max()]
    return {str(row["form"]): row for row in newest.to_dict("records")}


def _judge(
    module: str, forms: dict[str, dict[Any, Any]], versions: list[Any], shape: tuple[int, ...] | None
) -> HeldVersion:
    if NOT_COMPARABLE in forms:
        return HeldVersion(module, NOT_COMPARABLE, f"cannot compare: {forms[NOT_COMPARABLE]['layout']}")
    if not versions:
        return HeldVersion(module, NOT_COMPARABLE, "cannot compare: the trainer's trace has no such weight")
    held = forms[AS_HELD]
    stored = [tuple(map(int, row["shape"])) for row in forms.values()]  # as it is, and turned
    if shape not in stored:
        detail = (
            f"cannot compare: stored as {list(stored[0])}, padded perhaps, where the trainer has {list(shape or ())}"
        )
        return HeldVersion(module, NOT_COMPARABLE, detail)
    matches = list(_matches(held, versions))
    now = max((step for step, time_ns, _, _ in versions if time_ns <= held["time_ns"]), default=versions[0][0])
    whole = [match for match in matches if match[0] == 1.0]
    if whole:
        _, step, form = max(whole, key=lambda match: (match[1] <= now, match[1]))
        lag = max(now - step, 0)
        rounded = "" if form == "bf16" else f", rounded as {form.replace('+', ' ')}"
        where = f"the trainer's weights of step {step}{rounded}"
        return HeldVersion(module, BEHIND if lag else CURRENT, f"holds {where}" + f", {lag} behind" * (lag > 0), lag)
    turned = forms.get(TRANSPOSED)
    if turned is not None and any(share == 1.0 for share, _, _ in _matches(turned, versions)):
        return HeldVersion(module, TURNED, "holds the transpose of the trainer's weights")
    share, step, form = max(matches, default=(0.0, 0, ""))
    if share >= MOSTLY:
        n = len(held["hashes"])
        detail = f"{n - round(share * n)} of {n} rows differ from the trainer's weights of step {step} ({form})"
        return HeldVersion(module, FLIPPED, detail)
    return HeldVersion(module, UNKNOWN, "holds none of the versions that the trainer's trace has")


def _matches(held: dict[Any, Any], versions: list[Any]) -> Iterator[tuple[float, int, str]]:
    """(share of rows alike, step, form), of versions with rows in common."""
    rows = dict(zip(held["features"], held["hashes"], strict=True))
    for step, _, form, hashes in versions:
        common = rows.keys() & hashes.keys()
        if common:
            yield sum(rows[feature] == hashes[feature] for feature in common) / len(common), step, form
