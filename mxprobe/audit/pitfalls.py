"""Known ways of quantizing something else than was meant, each found in what a trace shows, each with its symptom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pandas as pd

from mxprobe.attribution.noise import weight_changes
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import Operand

from .modules import ModuleAudit, SideAudit

Modules = Sequence[ModuleAudit]

ROUTERS = ("*router*", "*.gate", "gate", "*shared_expert_gate*")
HEADS = ("*lm_head*", "*embed_out*", "*embed_tokens*", "*.output_layer", "*.score", "*classifier*")


@dataclass(frozen=True)
class Pitfall:
    """A known mistake: how it is called and what it does to a run."""

    slug: str
    title: str
    symptom: str


@dataclass(frozen=True)
class Finding:
    pitfall: Pitfall
    modules: tuple[str, ...]
    """Empty where it is about the run as a whole."""
    detail: str


PITFALLS: dict[str, Pitfall] = {
    each.slug: each
    for each in (
        Pitfall(
            "floor_div",
            "scale rule floor_div",
            "nearly every block clips its largest values; a bug of old serving kernels, never a choice",
        ),
        Pitfall(
            "router_quantized",
            "a router is quantized",
            "tokens go to other experts in rollout than in training; a name filter matched by substring",
        ),
        Pitfall(
            "head_quantized",
            "the lm_head or an embedding is quantized",
            "noise straight on the logits: entropy rises, mismatch even where all other layers agree",
        ),
        Pitfall(
            "evaluation_not_quantized",
            "evaluation runs in high precision, training or rollout does not",
            "evaluation scores are those of the BF16 model and look better than what is deployed",
        ),
        Pitfall(
            "evaluation_perturbed",
            "evaluation computes with something that training does not have",
            "evaluation scores are those of a noisy or other policy: adaptive quantization noise left on, old weights",
        ),
        Pitfall(
            "recipe_mismatch",
            "training and rollout quantize by different recipes",
            "a mismatch of 4 to 14 % RMS per operand from the scale rule alone, before any other error",
        ),
        Pitfall(
            "one_side_only",
            "quantized on one side only",
            "rollout and trainer are two policies: mismatch in every layer, importance ratios off",
        ),
        Pitfall(
            "left_out",
            "a few modules are left out on one side only",
            "a mismatch of single layers that looks like rounding noise; an exclude pattern of one side",
        ),
        Pitfall(
            "exclude_by_substring",
            "an exclude pattern matches more than it names",
            "layers meant to be quantized stay in high precision: `gate` for the router takes every gate_proj along",
        ),
        Pitfall(
            "mixed_recipes",
            "modules of one side follow different recipes",
            "a layer is rounded otherwise than its neighbours; a stale kernel or a per-layer override",
        ),
        Pitfall(
            "stale_weights",
            "the rollout computes with old weights",
            "mismatch grows while the rounding error of the weights stays the same; reward flat",
        ),
        Pitfall(
            "partial_refit",
            "some modules of the rollout compute with old weights",
            "mismatch that grows from a few layers; a refit that skips tensors by name",
        ),
        Pitfall(
            "reordered_weights",
            "the rollout computes with reordered or transposed weights",
            "garbage tokens, mismatch of several nats from the first step after a refit",
        ),
        Pitfall(
            "expert_differs",
            "a single expert computes something else than its layer's others",
            "tokens that meet it are wrong, the others right: an expert's weights transposed, exchanged or left behind",
        ),
        Pitfall(
            "unknown_weights",
            "the rollout computes with weights or a format that are not known",
            "mismatch that no rounding explains: weights from before attach, another model, a kernel fault",
        ),
        Pitfall(
            "flipped_weights",
            "single rows of the rollout's weights differ from the trainer's",
            "mismatch of a few layers from one refit on: a bit flip, a torn transfer",
        ),
        Pitfall(
            "zero_gradient",
            "no gradient comes back to some modules",
            "what lies below does not learn: an activation quantizer without straight-through estimator",
        ),
        Pitfall(
            "no_straight_through",
            "a quantizer lets no gradient through",
            "what lies below it, or its own weight, does not learn: rounding has a derivative of 0 almost everywhere",
        ),
        Pitfall(
            "weight_restored_before_backward",
            "the backward pass multiplies with the weight as it was before quantization",
            "dX is the gradient of another function than the forward computes; training looks better than it is",
        ),
        Pitfall(
            "transposed_requantized",
            "the backward pass quantizes the quantized weight once more, along its other axis",
            "an error in dX that is larger than either quantization makes, growing with depth",
        ),
        Pitfall(
            "blocks_cross_rows",
            "blocks cross rows",
            "tokens round each other: results depend on the rest of the batch; rows that are no multiple of a block",
        ),
        Pitfall(
            "eps_in_log2",
            "an eps inside log2 of the scale",
            "small gradients become zero: the scale stops following them, training stalls late and without a trace",
        ),
        Pitfall(
            "zero_seed_rounding",
            "stochastic rounding starts from the same seed in every call",
            "its error is a bias and not noise: it adds up over steps in place of averaging out",
        ),
        Pitfall(
            "nonfinite",
            "values that are not finite",
            "blocks with a NaN or an infinity are lost as a whole, and so is what they are multiplied with",
        ),
    )
}


def find_pitfalls(modules: Modules, events: pd.DataFrame) -> tuple[Finding, ...]:
    """All findings in the order of `PITFALLS`; events are the rows of that table."""
    found: list[Finding] = []
    for slug, search in _SEARCHES.items():
        found += [Finding(PITFALLS[slug], names, detail) for names, detail in search(modules, events)]
    order = list(PITFALLS)
    return tuple(sorted(found, key=lambda finding: order.index(finding.pitfall.slug)))


Found = Iterator[tuple[tuple[str, ...], str]]


def _quantized_by_name(patterns: tuple[str, ...], modules: Modules) -> Found:
    for side_name in ("train", "rollout"):
        named = [m.module for m in modules if _matches(m.module, patterns) and _is_quantized(getattr(m, side_name))]
        if named:
            yield tuple(named), f"quantized in {side_name}"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_quantized(side: SideAudit | None) -> bool:
    return side is not None and side.quantized


def _routers(modules: Modules, events: pd.DataFrame) -> Found:
    return _quantized_by_name(ROUTERS, modules)


def _heads(modules: Modules, events: pd.DataFrame) -> Found:
    return _quantized_by_name(HEADS, modules)


_FLOOR_DIV = Operand("mxfp4", Rule.FLOOR_DIV).inferred


def _floor_div(modules: Modules, events: pd.DataFrame) -> Found:
    for side_name in ("train", "rollout"):
        sides = [(m.module, getattr(m, side_name)) for m in modules]
        named = [name for name, side in sides if side is not None and side.exact and _FLOOR_DIV in side.recipe]
        if named:
            yield tuple(named), f"in {side_name}: its values reproduce the outputs exactly"


def _evaluation(modules: Modules, events: pd.DataFrame) -> Found:
    seen = [m for m in modules if m.evaluation is not None]
    plain = [m.module for m in seen if _is_plain(m.evaluation) and any(side.quantized for side in m.sides)]
    if plain:
        yield tuple(plain), f"{len(plain)} of {len(seen)} modules seen in evaluation"


def _is_plain(side: SideAudit | None) -> bool:
    return side is not None and not side.quantized and not side.unexplained


def _perturbed(modules: Modules, events: pd.DataFrame) -> Found:
    """Training is reproduced with its weights, evaluation with none that is known, or with noise on them."""
    off = [
        (m.module, m.evaluation.error)
        for m in modules
        if m.evaluation is not None and m.evaluation.unexplained and m.train is not None and m.train.exact
    ]
    if off:
        error = sorted(value for _, value in off)[len(off) // 2]
        yield tuple(name for name, _ in off), f"no known recipe reproduces it; median output error {error:.2g} there"
    noisy = weight_changes(events, "eval")
    if noisy:
        yield tuple(noisy), next(iter(noisy.values()))


def _substring(modules: Modules, events: pd.DataFrame) -> Found:
    """Modules in high precision whose names contain that of a router or head, though they are none."""
    for side_name in ("train", "rollout"):
        sides = [(m.module, getattr(m, side_name)) for m in modules]
        plain = [name for name, side in sides if _is_plain(side)]
        quantized = [name for name, side in sides if _is_quantized(side)]
        special = {name.rpartition(".")[2] for name in plain if _matches(name, ROUTERS + HEADS)}
        for word in sorted(special):
            taken = [name for name in plain if word in name and not _matches(name, ROUTERS + HEADS)]
            if taken and quantized and not any(word in name for name in quantized):
                yield tuple(taken), f"in {side_name}: every module with {word!r} in its name is left out"


def _both(modules: Modules) -> list[tuple[ModuleAudit, SideAudit, SideAudit]]:
    return [(m, m.train, m.rollout) for m in modules if m.train is not None and m.rollout is not None]


def _recipe_mismatch(modules: Modules, events: pd.DataFrame) -> Found:
    kinds: dict[tuple[str, str], list[str]] = {}
    for module, train, rollout in _both(modules):
        known = train.exact and rollout.exact and train.quantized and rollout.quantized
        if known and train.recipe != rollout.recipe:
            kinds.setdefault((train.words, rollout.words), []).append(module.module)
    for (train_words, rollout_words), names in kinds.items():
        yield tuple(names), f"{train_words} in training, {rollout_words} in rollout"


def _one_sided(modules: Modules) -> dict[str, list[str]]:
    """Side that quantizes -> modules that the other side leaves in high precision."""
    found: dict[str, list[str]] = {"train": [], "rollout": []}
    for module, train, rollout in _both(modules):
        if train.exact and rollout.exact and train.quantized != rollout.quantized:
            found["train" if train.quantized else "rollout"].append(module.module)
    return found


def _n_quantized(modules: Modules, side_name: str) -> int:
    return sum(_is_quantized(getattr(m, side_name)) for m in modules)


def _one_side_only(modules: Modules, events: pd.DataFrame) -> Found:
    for side, names in _one_sided(modules).items():
        other = "rollout" if side == "train" else "train"
        if names and _n_quantized(modules, other) == 0:
            yield tuple(names), f"in {side}; the other side is in high precision throughout"


def _left_out(modules: Modules, events: pd.DataFrame) -> Found:
    for side, names in _one_sided(modules).items():
        other = "rollout" if side == "train" else "train"
        special = [name for name in names if not _matches(name, ROUTERS + HEADS)]
        if special and _n_quantized(modules, other) > 0:
            yield tuple(special), f"quantized in {side}, in high precision in {other}"


def _mixed(modules: Modules, events: pd.DataFrame) -> Found:
    """Recipes that a minority of modules follows; routers and heads have findings of their own."""
    for side_name in ("train", "rollout"):
        known = [(m, getattr(m, side_name)) for m in modules if not _matches(m.module, ROUTERS + HEADS)]
        sides = [(m.module, side) for m, side in known if side is not None and side.exact and side.quantized]
        common = Counter(side.recipe for _, side in sides).most_common(1)
        odd = [(name, side) for name, side in sides if side.recipe != common[0][0]] if common else []
        both = {m.module for m, train, rollout in _both(modules) if train.recipe == rollout.recipe}
        odd = [(name, side) for name, side in odd if side_name == "train" or name not in both]
        if odd:
            usual = next(side.words for _, side in sides if side.recipe == common[0][0])
            words = " and ".join(sorted({side.words for _, side in odd}))
            yield tuple(name for name, _ in odd), f"{words} in {side_name}, the others {usual}"


def _lagging(modules: Modules) -> tuple[list[ModuleAudit], int]:
    known = [m for m in modules if m.rollout is not None and m.rollout.weight_lag is not None]
    return [m for m in known if m.rollout is not None and (m.rollout.weight_lag or 0) > 0], len(known)


def _stale(modules: Modules, events: pd.DataFrame) -> Found:
    behind, n_known = _lagging(modules)
    if behind and len(behind) == n_known:
        yield tuple(m.module for m in behind), f"all {n_known} modules whose weights are known: {_lag_words(behind)}"


def _partial(modules: Modules, events: pd.DataFrame) -> Found:
    behind, n_known = _lagging(modules)
    if behind and len(behind) < n_known:
        yield tuple(m.module for m in behind), f"{len(behind)} of {n_known} modules: {_lag_words(behind)}"


def _lag_words(behind: Modules) -> str:
    lags = sorted({m.rollout.weight_lag or 0 for m in behind if m.rollout is not None})
    return f"{lags[0]} steps behind" if len(lags) == 1 else f"{lags[0]} to {lags[-1]} steps behind"


_REORDERED = ("in another order", "the transpose of")


def _sync_events(events: pd.DataFrame) -> dict[str, str]:
    """Module -> the last thing told about weights of its rollout that are not known."""
    rows = events[events["kind"] == "weight_sync"]
    parts = [str(detail).partition(": ") for detail in rows["detail"]]
    told = {head.rpartition(" ")[0]: (head.rpartition(" ")[2], tail) for head, _, tail in parts}
    return {module: tail for module, (state, tail) in told.items() if state == "unknown"}


def _reordered(modules: Modules, events: pd.DataFrame) -> Found:
    named: dict[str, list[str]] = {}
    for module, said in _sync_events(events).items():
        if any(words in said for words in _REORDERED):
            named.setdefault(said, []).append(module)
    for said, names in named.items():
        yield tuple(names), said


def _experts(modules: Modules, events: pd.DataFrame) -> Found:
    rows = events[events["kind"] == "experts"]
    for place, _, what in (str(detail).partition(": ") for detail in rows["detail"]):
        module, _, expert = place.partition(" expert ")
        yield (module,), f"expert {expert}: {what}"


def _unknown(modules: Modules, events: pd.DataFrame) -> Found:
    told = _sync_events(events)
    lost = [
        m.module for m in modules if m.rollout is not None and m.rollout.unexplained and m.rollout.weight_lag is None
    ]
    lost = [name for name in lost if not any(words in told.get(name, "") for words in _REORDERED)]
    if lost:
        yield tuple(lost), told.get(lost[0], "no known recipe reproduces the outputs with the trainer's weights")


def _zero_gradient(modules: Modules, events: pd.DataFrame) -> Found:
    silent = tuple(m.module for m in modules if m.zero_gradient)
    if silent:
        yield silent, "the output got no gradient, or one of exact zeros, at every probed step"


def _nonfinite(modules: Modules, events: pd.DataFrame) -> Found:
    rows = events[events["kind"] == "nonfinite"].sort_values("step", kind="stable")
    if len(rows):
        places = [str(detail).partition(":")[0] for detail in rows["detail"]]
        names = tuple(dict.fromkeys(place.rpartition(" ")[0] for place in places))
        yield names, f"first at step {int(rows['step'].iloc[0])} in {places[0]}"


_SEARCHES: dict[str, Callable[[Modules, pd.DataFrame], Found]] = {
    "floor_div": _floor_div,
    "router_quantized": _routers,
    "head_quantized": _heads,
    "evaluation_not_quantized": _evaluation,
    "evaluation_perturbed": _perturbed,
    "exclude_by_substring": _substring,
    "recipe_mismatch": _recipe_mismatch,
    "one_side_only": _one_side_only,
    "left_out": _left_out,
    "mixed_recipes": _mixed,
    "stale_weights": _stale,
    "partial_refit": _partial,
    "reordered_weights": _reordered,
    "expert_differs": _experts,
    "unknown_weights": _unknown,
    "zero_gradient": _zero_gradient,
    "nonfinite": _nonfinite,
}
