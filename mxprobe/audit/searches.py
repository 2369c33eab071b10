"""One search for each pitfall that a trace can show: a function of what was seen that yields modules and a detail.

To add one: an entry in `pitfalls.toml`, and a function here under `@finds` with its slug.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import pandas as pd

from mxprobe.attribution.weight_changes import weight_changes
from mxprobe.events import EXPERTS, NONFINITE, WEIGHT_SYNC, Event
from mxprobe.schema import Phase
from mxprobe.trace.event_facts import events_of
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import Operand

from .module_audit import ModuleAudit, SideAudit
from .pitfalls import PITFALLS, Finding

ROUTERS = ("*router*", "*.gate", "gate", "*shared_expert_gate*")
HEADS = ("*lm_head*", "*embed_out*", "*embed_tokens*", "*.output_layer", "*.score", "*classifier*")
SIDES = ("train", "rollout")
_FLOOR_DIV = Operand("mxfp4", Rule.FLOOR_DIV).inferred


class Seen(NamedTuple):
    """What a search looks at."""

    modules: Sequence[ModuleAudit]
    events: pd.DataFrame
    """Rows of that table."""

    def on(self, side: str) -> Iterator[tuple[str, SideAudit]]:
        """Yield (module, side) of the modules that were seen there."""
        for module in self.modules:
            found: SideAudit | None = getattr(module, side)
            if found is not None:
                yield module.module, found

    @property
    def both(self) -> list[tuple[ModuleAudit, SideAudit, SideAudit]]:
        """Return the modules that were seen on both sides, with training and rollout."""
        return [(m, m.train, m.rollout) for m in self.modules if m.train is not None and m.rollout is not None]


Found = Iterator[tuple[tuple[str, ...], str]]
Search = Callable[[Seen], Found]

_SEARCHES: dict[str, Search] = {}


def finds(slug: str) -> Callable[[Search], Search]:
    """Register a function as the search for a pitfall."""

    def register(search: Search) -> Search:
        _SEARCHES[slug] = search
        return search

    return register


def find_pitfalls(modules: Sequence[ModuleAudit], events: pd.DataFrame) -> tuple[Finding, ...]:
    """Return all findings in the order of `PITFALLS`; events are the rows of that table."""
    seen = Seen(modules, events)
    return tuple(
        Finding(pitfall, names, detail)
        for slug, pitfall in PITFALLS.items()
        if slug in _SEARCHES
        for names, detail in _SEARCHES[slug](seen)
    )


@finds("floor_div")
def _floor_div(seen: Seen) -> Found:
    for side in SIDES:
        named = [name for name, found in seen.on(side) if found.exact and _FLOOR_DIV in found.recipe]
        if named:
            yield tuple(named), f"in {side}: its values reproduce the outputs exactly"


@finds("router_quantized")
def _routers(seen: Seen) -> Found:
    return _quantized_by_name(ROUTERS, seen)


@finds("head_quantized")
def _heads(seen: Seen) -> Found:
    return _quantized_by_name(HEADS, seen)


def _quantized_by_name(patterns: tuple[str, ...], seen: Seen) -> Found:
    for side in SIDES:
        named = [name for name, found in seen.on(side) if found.quantized and _matches(name, patterns)]
        if named:
            yield tuple(named), f"quantized in {side}"


@finds("evaluation_not_quantized")
def _evaluation(seen: Seen) -> Found:
    evaluated = [m for m in seen.modules if m.evaluation is not None]
    plain = [
        m.module
        for m in evaluated
        if m.evaluation is not None and _is_plain(m.evaluation) and any(side.quantized for side in m.sides)
    ]
    if plain:
        yield tuple(plain), f"{len(plain)} of {len(evaluated)} modules seen in evaluation"


@finds("evaluation_perturbed")
def _perturbed(seen: Seen) -> Found:
    """Training is reproduced with its weights, evaluation with none that is known, or with noise on them."""
    off = [
        (m.module, m.evaluation.error)
        for m in seen.modules
        if m.evaluation is not None and m.evaluation.unexplained and m.train is not None and m.train.exact
    ]
    if off:
        error = sorted(value for _, value in off)[len(off) // 2]
        yield tuple(name for name, _ in off), f"no known recipe reproduces it; median output error {error:.2g} there"
    noisy = weight_changes(seen.events, Phase.EVAL.value)
    if noisy:
        yield tuple(noisy), next(iter(noisy.values()))


@finds("recipe_mismatch")
def _recipe_mismatch(seen: Seen) -> Found:
    kinds: dict[tuple[str, str], list[str]] = {}
    for module, train, rollout in seen.both:
        known = train.exact and rollout.exact and train.quantized and rollout.quantized
        if known and train.recipe != rollout.recipe:
            kinds.setdefault((train.words, rollout.words), []).append(module.module)
    for (train_words, rollout_words), names in kinds.items():
        yield tuple(names), f"{train_words} in training, {rollout_words} in rollout"


@finds("one_side_only")
def _one_side_only(seen: Seen) -> Found:
    for side, _, names, n_other in _one_sided(seen):
        if names and n_other == 0:
            yield tuple(names), f"in {side}; the other side is in high precision throughout"


@finds("left_out")
def _left_out(seen: Seen) -> Found:
    for side, other, names, n_other in _one_sided(seen):
        special = [name for name in names if not _matches(name, ROUTERS + HEADS)]
        if special and n_other > 0:
            yield tuple(special), f"quantized in {side}, in high precision in {other}"


def _one_sided(seen: Seen) -> Iterator[tuple[str, str, list[str], int]]:
    """Yield (side that quantizes, the other, modules that only the first quantizes, all that the other quantizes)."""
    both = [(module.module, train, rollout) for module, train, rollout in seen.both if train.exact and rollout.exact]
    for side, other in (SIDES, SIDES[::-1]):
        names = [
            name for name, *found in both if found[SIDES.index(side)].quantized > found[SIDES.index(other)].quantized
        ]
        yield side, other, names, sum(found.quantized for _, found in seen.on(other))


@finds("exclude_by_substring")
def _substring(seen: Seen) -> Found:
    """Yield modules in high precision whose names contain that of a router or head, though they are none."""
    for side in SIDES:
        plain = [name for name, found in seen.on(side) if _is_plain(found)]
        quantized = [name for name, found in seen.on(side) if found.quantized]
        special = {name.rpartition(".")[2] for name in plain if _matches(name, ROUTERS + HEADS)}
        for word in sorted(special):
            taken = [name for name in plain if word in name and not _matches(name, ROUTERS + HEADS)]
            if taken and quantized and not any(word in name for name in quantized):
                yield tuple(taken), f"in {side}: every module with {word!r} in its name is left out"


@finds("mixed_recipes")
def _mixed(seen: Seen) -> Found:
    """Yield recipes that a minority of modules follows; routers and heads have findings of their own."""
    both = {m.module for m, train, rollout in seen.both if train.recipe == rollout.recipe}
    for side in SIDES:
        known = [
            (name, found)
            for name, found in seen.on(side)
            if found.exact and found.quantized and not _matches(name, ROUTERS + HEADS)
        ]
        common = Counter(found.recipe for _, found in known).most_common(1)
        odd = [(name, found) for name, found in known if found.recipe != common[0][0]]
        odd = [(name, found) for name, found in odd if side == "train" or name not in both]
        if odd:
            usual = next(found.words for _, found in known if found.recipe == common[0][0])
            words = " and ".join(sorted({found.words for _, found in odd}))
            yield tuple(name for name, _ in odd), f"{words} in {side}, the others {usual}"


@finds("stale_weights")
def _stale(seen: Seen) -> Found:
    behind, n_known = _lagging(seen)
    if behind and len(behind) == n_known:
        yield tuple(behind), f"all {n_known} modules whose weights are known: {_lag_words(behind)}"


@finds("partial_refit")
def _partial(seen: Seen) -> Found:
    behind, n_known = _lagging(seen)
    if behind and len(behind) < n_known:
        yield tuple(behind), f"{len(behind)} of {n_known} modules: {_lag_words(behind)}"


def _lagging(seen: Seen) -> tuple[dict[str, int], int]:
    """Return module -> steps that its rollout is behind, and how many modules there are whose weights are known."""
    known = {name: found.weight_lag for name, found in seen.on("rollout") if found.weight_lag is not None}
    return {name: lag for name, lag in known.items() if lag > 0}, len(known)


def _lag_words(behind: dict[str, int]) -> str:
    least, most = min(behind.values()), max(behind.values())
    return f"{least} steps behind" if least == most else f"{least} to {most} steps behind"


_REORDERED = ("reordered", "transposed")


def _lost_weights(seen: Seen) -> dict[str, Event]:
    """Return module -> the last event on its rollout's weights, where these are no version of the trainer's."""
    last = {event.subject: event for _, event in events_of(seen.events, WEIGHT_SYNC)}
    return {module: event for module, event in last.items() if event.state in (*_REORDERED, "unknown")}


@finds("reordered_weights")
def _reordered(seen: Seen) -> Found:
    named: dict[str, list[str]] = {}
    for module, event in _lost_weights(seen).items():
        if event.state in _REORDERED:
            named.setdefault(event.said, []).append(module)
    for said, names in named.items():
        yield tuple(names), said


@finds("expert_differs")
def _experts(seen: Seen) -> Found:
    for _, event in events_of(seen.events, EXPERTS):
        yield (event.subject,), f"expert {event.data['expert']} {event.data['phase']}: {event.said}"


@finds("unknown_weights")
def _unknown(seen: Seen) -> Found:
    told = _lost_weights(seen)
    lost = [name for name, found in seen.on("rollout") if found.unexplained and found.weight_lag is None]
    lost = [name for name in lost if name not in told or told[name].state not in _REORDERED]
    if lost:
        why = "no known recipe reproduces the outputs with the trainer's weights"
        yield tuple(lost), told[lost[0]].said if lost[0] in told else why


@finds("zero_gradient")
def _zero_gradient(seen: Seen) -> Found:
    silent = tuple(m.module for m in seen.modules if m.zero_gradient)
    if silent:
        yield silent, "the output got no gradient, or one of exact zeros, at every probed step"


@finds("nonfinite")
def _nonfinite(seen: Seen) -> Found:
    told = sorted(events_of(seen.events, NONFINITE), key=lambda each: each[0])
    if told:
        step, first = told[0]
        names = tuple(dict.fromkeys(event.subject for _, event in told))
        yield names, f"first at step {step} in {first.subject} {first.data['role']}"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_plain(side: SideAudit) -> bool:
    return not side.quantized and not side.unexplained
