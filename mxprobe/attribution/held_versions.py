"""Which of the trainer's weights does an engine hold? From table `weight_codes` of both traces.

An engine's rows of a module are set against every version of the trainer's that was hashed, in every form: as it is and
rounded by each rule. All rows alike: the engine holds that version. Of each module those rows count that were taken
when most of the trainer's versions were kept step by step, `LAGS` or more being as good, and of these the newest; those
of each worker of the engine for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from mxprobe.schema import AS_HELD, NOT_COMPARABLE, TRANSPOSED, WEIGHT_CODES, Phase
from mxprobe.trace import Trace

from .trainer_versions import Version, Versions

CURRENT, BEHIND, TURNED, FLIPPED, UNKNOWN = "current", "behind", "transposed", "flipped", "unknown"
BETWEEN = "between"
WRONG = (BEHIND, TURNED, FLIPPED, UNKNOWN)
"""States that are findings."""
LAGS = 4
"""Versions without a gap that are enough: so many are kept around a probed step
(`mxprobe.measuring.versions.weight_history`)."""
MAX_NAMED = 3
"""Weights that a sentence names."""
MOSTLY = 0.5
"""Share of a version's rows that must be alike for the others to be called flipped."""

_Forms = dict[str, dict[Any, Any]]
"""Form -> row of an engine's table, of one module at one step."""


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
    """Return what is held of every module that the engine's trace has rows of; both traces may be the same one."""
    if not (rollout.table(WEIGHT_CODES, ("phase",))["phase"].astype(str) == Phase.ROLLOUT.value).any():
        return ()  # without reading what most traces hold: a trainer's rows alone
    rows = rollout.table(WEIGHT_CODES)
    rows = rows[rows["phase"].astype(str) == Phase.ROLLOUT.value]
    versions = Versions(trainer.table(WEIGHT_CODES))
    read: dict[str, list[tuple[int, dict[str, HeldVersion]]]] = {}
    for rank in sorted(rows["rank"].unique().tolist()):
        for module, group in rows[rows["rank"] == rank].groupby("module", observed=True, sort=False):
            name = str(module)
            forms = _newest(group, versions)
            read.setdefault(name, []).append((rank, _by_reading(name, forms, versions.of(name))))
    agreed = _agreed(each for workers in read.values() for _, each in workers)
    judged = [
        each
        for name, workers in read.items()
        for each in _by_worker([(rank, _chosen(name, found, agreed)) for rank, found in workers])
    ]
    return tuple(_not_kept(judged, has_gaps=versions.has_gaps))


def held_words(held: Sequence[HeldVersion]) -> str:
    """Return `layers.1.q_proj holds the trainer's weights of step 7, 3 behind; ...`, of the first few."""
    return "; ".join(dict.fromkeys(f"{each.module} {each.detail}" for each in held[:MAX_NAMED]))


def _by_reading(module: str, forms: _Forms, versions: list[Version]) -> dict[str, HeldVersion]:
    """Return what is held if the trainer's experts are stored so, for every way in which they may be."""
    readings = dict.fromkeys(each.reading for each in versions)
    found = {
        reading: _judge(module, forms, [each for each in versions if each.reading == reading]) for reading in readings
    }
    comparable = {reading: each for reading, each in found.items() if each.state != NOT_COMPARABLE}
    return comparable or dict(list(found.items())[:1]) or {"": _judge(module, forms, [])}


def _agreed(found: Iterator[dict[str, HeldVersion]]) -> Counter[str]:
    """Return reading -> weights that it finds a version of, among those that can be read in several ways."""
    return Counter(
        reading for each in found if len(each) > 1 for reading, held in each.items() if held.state in (CURRENT, BEHIND)
    )


def _chosen(module: str, found: dict[str, HeldVersion], agreed: Counter[str]) -> HeldVersion:
    if len(found) == 1:
        return next(iter(found.values()))
    best, *others = sorted(found, key=lambda reading: -agreed[reading])
    if agreed[best] == agreed[others[0]]:
        ways = " or ".join(found)
        detail = f"cannot compare: the trainer's trace does not tell whether its experts are stored {ways}"
        return HeldVersion(module, NOT_COMPARABLE, f"{detail}, and what the engine holds agrees with neither")
    held = found[best]
    return replace(held, detail=f"{held.detail}; read as stored {best}, with which {agreed[best]} weights agree")


def _by_worker(workers: list[tuple[int, HeldVersion]]) -> Iterator[HeldVersion]:
    """Yield one for the module where all workers hold the same; else each, with its rank."""
    first = workers[0][1]
    if all(each == first for _, each in workers):
        yield first
        return
    for rank, each in workers:
        yield replace(each, module=f"{each.module} (rank {rank})")


def _not_kept(judged: list[HeldVersion], *, has_gaps: bool) -> Iterator[HeldVersion]:
    """Call a version in between what is not kept, where few modules hold a version that was.

    Nor are they unknown, where the trainer has steps whose weights were not kept.
    """
    n_exact = sum(each.state in (CURRENT, BEHIND) for each in judged)
    between = {FLIPPED, UNKNOWN} if has_gaps else {FLIPPED}
    n_between = sum(each.state in between for each in judged)
    for each in judged:
        if each.state in between and n_between > n_exact:
            yield replace(each, state=BETWEEN, detail=f"holds a version between those kept: {each.detail}")
        else:
            yield each


def _newest(group: pd.DataFrame, versions: Versions) -> _Forms:
    """Return the rows of one module to be judged."""
    began: dict[Any, Any] = group.groupby("step")["time_ns"].min().to_dict()
    told = {step: min(versions.n_before(time_ns), LAGS) for step, time_ns in began.items()}
    newest = group[group["step"] == max(began, key=lambda step: (told[step], step))]
    return {str(row["form"]): row for row in newest.to_dict("records")}


def _judge(module: str, forms: _Forms, versions: list[Version]) -> HeldVersion:
    if NOT_COMPARABLE in forms:
        return HeldVersion(module, NOT_COMPARABLE, f"cannot compare: {forms[NOT_COMPARABLE]['layout']}")
    if not versions:
        return HeldVersion(module, NOT_COMPARABLE, "cannot compare: the trainer's trace has no such weight")
    held = forms[AS_HELD]
    stored = [tuple(map(int, row["shape"])) for row in forms.values()]  # as it is, and turned
    if versions[0].shape not in stored:
        shape = list(versions[0].shape)
        detail = f"cannot compare: stored as {list(stored[0])}, padded perhaps, where the trainer has {shape}"
        return HeldVersion(module, NOT_COMPARABLE, detail)
    now = max((each.step for each in versions if each.time_ns <= held["time_ns"]), default=versions[-1].step)
    share, best = 0.0, versions[0]
    for version, alike in _matches(held, versions, now):
        if alike == 1.0:
            lag = max(now - version.step, 0)
            rounded = "" if version.form == "bf16" else f", rounded as {version.form.replace('+', ' ')}"
            where = f"the trainer's weights of step {version.step}{rounded}"
            words = f"holds {where}" + f", {lag} behind" * (lag > 0)
            return HeldVersion(module, BEHIND if lag else CURRENT, words, lag)
        if alike > share:
            share, best = alike, version
    turned = forms.get(TRANSPOSED)
    if turned is not None and any(alike == 1.0 for _, alike in _matches(turned, versions, now)):
        return HeldVersion(module, TURNED, "holds the transpose of the trainer's weights")
    if share >= MOSTLY:
        n = len(held["hashes"])
        detail = f"{n - round(share * n)} of {n} rows differ from the trainer's weights of step {best.step}"
        return HeldVersion(module, FLIPPED, f"{detail} ({best.form})")
    return HeldVersion(module, UNKNOWN, "holds none of the versions that the trainer's trace has")


def _matches(held: dict[Any, Any], versions: list[Version], now: int) -> Iterator[tuple[Version, float]]:
    """Yield versions with rows in common and the share of these that are alike: the newest until `now` first."""
    rows = {int(feature): int(digest) for feature, digest in zip(held["features"], held["hashes"], strict=True)}
    for version in sorted(versions, key=lambda each: (each.step > now, -each.step)):
        share = version.agrees(rows)
        if share is not None:
            yield version, share
