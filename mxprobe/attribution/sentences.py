"""The verdict in sentences: the headline, and what would have to be seen for another one."""

import math

import numpy as np

from mxprobe.numbers import number, whole_percent
from mxprobe.schema import Component, Verdict

from . import words
from .decision import Decision, Reason
from .evidence import MAX_FAR_NAMES, phases_seen
from .measured import Measured
from .symptom import far_modules, share_of_far
from .thresholds import Thresholds
from .token_mismatch import behind_words


def headline(decision: Decision, measured: Measured, thresholds: Thresholds) -> str:
    """Return the verdict in one or two sentences that name the place and the correction."""
    where, component = words.place(decision.where), words.COMPONENT_WORDS[decision.component]
    match decision.reason:
        case Reason.NO_ROWS:
            return "Not enough evidence: the trace holds no realised output errors."
        case Reason.HIGH_PRECISION:
            return f"Nothing is quantized here: outputs in {phases_seen(measured)} match high precision." + _would(
                decision
            )
        case Reason.NO_GENERATION:
            return (
                "Not enough evidence: no generation was recognised. Training computes in high precision; how the "
                "rollout computes is not known."
            )
        case Reason.FEW_STEPS:
            return f"Not enough evidence: {measured.n_steps} probed steps, {thresholds.min_steps} are needed."
        case Reason.ONE_PHASE:
            return (
                f"Not enough evidence: only {phases_seen(measured)} was seen, so that training and rollout "
                "cannot be compared."
            )
        case Reason.NO_SYMPTOM:
            rounds = [fit.phase for fit in decision.fits]
            cost = _cost(measured) if len(rounds) > 1 else ""
            return f"None needed: training and rollout differ by less than makes a symptom.{cost}"
        case Reason.BEHIND:
            return (
                f"Not explained by MXFP4 rounding: the rollout's weights are stale. In it "
                f"{behind_words(measured.sides.behind)} (measured). Mend the weight sync first."
            )
        case Reason.RULES:
            rules = decision.rules
            return (
                f"Rule mismatch, not explained by rounding alone: training rounds by {rules.train}, the rollout by "
                f"{rules.rollout}, in {rules.n_modules} of {rules.n_both} modules that both sides quantize (measured). "
                "Give both sides one rule first."
            )
        case Reason.ELSEWHERE:
            return (
                "Not explained by MXFP4 rounding: rollout and trainer disagree on the probabilities of tokens, though "
                "the layers that were seen compute the same on both sides."
            )
        case Reason.FAR:
            far = np.flatnonzero(far_modules(decision.fits, len(measured.modules)))
            names = [measured.modules[m] for m in far]
            few = 0 < len(names) <= MAX_FAR_NAMES
            who = f"{words.listed(names)} {'does' if len(names) == 1 else 'do'}" if few else "the layers do"
            return (
                f"Not explained by MXFP4 rounding: {who} not compute what inputs and the trainer's "
                "weights predict under any recipe known here. No correction can be named for that."
            )
        case Reason.REPLAYED:
            share = measured.explained.share if measured.explained else math.nan
            return (
                f"Not explained by MXFP4 rounding: replayed with every Linear rounded, training batches show "
                f"{whole_percent(share)} of the disagreement of rollout and trainer on the probabilities of tokens. "
                "No correction can be named for the rest."
            )
        case Reason.NO_OPERANDS:
            return "Not enough evidence: rollout and training disagree, but the trace holds no operand statistics."
        case Reason.CHOSEN:
            cause = words.sentence(component)
            names = [words.correction_words(name) for name in decision.chosen]
            if decision.component is Component.MIXED:
                cause = "Rounding error with no single component"
            says = f"{cause} in {where} sets rollout and training apart."
            if decision.verdict is Verdict.UNDECIDED:
                return f"{says} Undecided between {words.listed(names)}, the favourite first."
            if decision.verdict is Verdict.KEEP_HIGH_PRECISION:
                return f"{says} No correction mends it: keep them in high precision."
            return f"{says} Enable {names[0]} there."


def what_would_change(decision: Decision, measured: Measured, thresholds: Thresholds) -> str:
    """Say what to measure or see for another verdict."""
    seen = decision.mismatch
    match decision.reason:
        case Reason.NO_ROWS | Reason.FEW_STEPS:
            return f"Probing at least {thresholds.min_steps} steps: attach for longer, or with a smaller --every."
        case Reason.HIGH_PRECISION:
            return "A run in which outputs differ from their high-precision product, in training or in rollout."
        case Reason.NO_GENERATION:
            return (
                "A trace that holds the rollout. Where this process generates, write `with mxprobe.rollout(model):` "
                "around it, or attach again with --rollout-in FUNCTION. Where an engine generates in another process, "
                "attach to that one too."
            )
        case Reason.ONE_PHASE:
            return "A trace that holds both sides: attach to the process that trains and to the one that generates."
        case Reason.NO_SYMPTOM:
            weights = np.ones(measured.n_clusters)
            log_probs = measured.sides.seen(weights)
            if log_probs is not None:
                return (
                    f"A mean |log-probability difference| above {number(log_probs.gate(thresholds))} nats (now "
                    f"{number(log_probs.abs_d(weights))}), or an effective sample size lower by more than "
                    f"{whole_percent(thresholds.ess_loss)} (now {whole_percent(log_probs.ess_loss(weights))})."
                )
            return (
                f"A median mismatch above {number(seen.gate(thresholds))} (now {number(seen.median)}), "
                f"{whole_percent(thresholds.far_share)} of the Linears over that (now "
                f"{whole_percent(seen.share_above(seen.gate(thresholds)))}), one over "
                f"{number(max(thresholds.mismatch_alone, seen.gate(thresholds)))} (now "
                f"{number(seen.largest)}), or log-probabilities of rollout and trainer, which this trace does "
                "not hold."
            )
        case Reason.BEHIND:
            return "A run whose rollout uses current weights; what is left of the mismatch then has another cause."
        case Reason.RULES:
            return "A run whose two sides round alike; what is left of the mismatch then has another cause."
        case Reason.ELSEWHERE:
            return (
                "Something outside the layers seen: the lm_head or a router, the attention or its key-value cache, "
                "another position or mask of the same tokens, modules that the coverage lists as not seen."
            )
        case Reason.REPLAYED:
            return (
                "Replays that show more of the mismatch, or a cause outside the Linears mended: the lm_head or a "
                "router, the attention or its key-value cache, raw against processed log-probabilities, async lag."
            )
        case Reason.FAR:
            share = share_of_far(seen, far_modules(decision.fits, len(measured.modules)))
            many = any(fit.far_share >= thresholds.far_share for fit in decision.fits)
            needs = [f"fewer than {whole_percent(thresholds.far_share)} of the modules far from their prediction"]
            needs = needs if many else []
            if share > thresholds.unexplained:
                needs.append(
                    f"no more than {whole_percent(thresholds.unexplained)} of the mismatch made by modules far from "
                    f"their prediction (now {whole_percent(share)})"
                )
            return (
                f"{words.sentence(words.listed(needs))}. Look first at async policy lag and at raw against processed "
                "log-probabilities; then at stale or wrong weights in the rollout, another rule or format there, and "
                "its kernels."
            )
        case Reason.NO_OPERANDS:
            return "Operand statistics: attach to the process that trains."
        case Reason.CHOSEN:
            share = {Component.DEADZONE: "zeroed", Component.SATURATION: "saturated"}.get(
                decision.component, decision.component.value
            )
            margin = (
                f", less than {whole_percent(thresholds.component_share)} of the output error as "
                f"{words.COMPONENT_WORDS[decision.component]} (now {whole_percent(decision.shares[share])})"
                if share in decision.shares
                else ""
            )
            replay = (
                "A replay of the same prompts under each of them decides between the corrections. "
                if decision.verdict is Verdict.UNDECIDED
                else ""
            )
            return (
                f"{replay}Another verdict needs {_no_symptom(decision, thresholds)}{margin}, or layers that stop "
                "following their prediction."
            )


def _no_symptom(decision: Decision, thresholds: Thresholds) -> str:
    """Say what the layers' mismatch must be to make no symptom."""
    seen, gate = decision.mismatch, decision.mismatch.gate(thresholds)
    share = decision.situation.share if decision.situation is not None else None
    allowed = thresholds.far_share if share is None else min(share, thresholds.far_share)
    over, largest = whole_percent(seen.share_above(gate)), number(seen.largest)
    if allowed < 1e-9:
        return f"no mismatch of a Linear over {number(gate)} (now {over} of them, the largest {largest})"
    return (
        f"a median mismatch under {number(gate)} (now {number(seen.median)}) with less than "
        f"{whole_percent(allowed)} of the Linears over it (now {over}) and none over "
        f"{number(max(thresholds.mismatch_alone, gate))} (now {largest})"
    )


def _cost(measured: Measured) -> str:
    """Say what rounding costs a run whose two sides round alike."""
    weights = np.ones(measured.n_clusters)
    errors = [float(np.nanmedian(sums.realised(weights))) for sums in measured.outputs.values()]
    return f" Both carry rounding: a median error of {number(max(errors))} of a layer's output energy (measured)."


def _would(decision: Decision) -> str:
    """Say what MXFP4 would do to a high-precision run."""
    if not decision.where:
        return ""
    largest = max(group.output_error for group in decision.where)
    sentence = (
        f" MXFP4 would put an error of up to {number(largest)} of the output's energy into "
        f"{words.place(decision.where)}, mostly {words.COMPONENT_WORDS[decision.component]} (predicted)."
    )
    helpful = [score for score in decision.scores if score.is_eligible and score.tier == 1]
    if helpful:
        best = max(helpful, key=lambda score: score.gain)
        helps = words.sentence(words.correction_words(best.correction))
        sentence += f" {helps} would remove {whole_percent(best.gain)} of it."
    return sentence
