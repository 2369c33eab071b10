"""What would help: every correction scored on the named operands, with interval, recovery and cost."""

import math
from typing import Any

from markupsafe import Markup

from mxprobe.attribution import CorrectionScore, Recommendation
from mxprobe.numbers import fixed, interval
from mxprobe.schema import Verdict
from mxprobe_kernels.formats import Correction, CorrectionKind

from .rendering import render

_WORDS: dict[CorrectionKind, str] = {
    CorrectionKind.RULE: "scale rule {}",
    CorrectionKind.MACRO_BLOCK_SCALING: "macro-block scaling over {}",
    CorrectionKind.OUTLIER_FALLBACK: "outlier fallback, α = {}",
    CorrectionKind.HADAMARD: "Hadamard rotation of {}",
    CorrectionKind.CHANNEL_RESIDUAL: "second pass on {:g} % of the channels",
    CorrectionKind.NVFP4: "NVFP4 blocks of 16",
    CorrectionKind.NVFP4_4OVER6: "NVFP4 with Four-over-Six",
    CorrectionKind.MXFP4_4OVER6: "the better of two scales for each block",
    CorrectionKind.HIF4: "HiF4 blocks of 64",
    CorrectionKind.MXFP6_E2M3: "MXFP6 elements (E2M3)",
    CorrectionKind.MXFP6_E3M2: "MXFP6 elements (E3M2)",
    CorrectionKind.MXFP8: "MXFP8 elements",
    CorrectionKind.KEEP_HIGH_PRECISION: "keep these operands in BF16",
}


_NONE_SCORED: dict[Verdict, str] = {
    Verdict.NOT_EXPLAINED: "No correction is offered: what the run shows is not rounding, so mending the rounding "
    "would not mend the run. What was measured on each operand is under the selected layer.",
    Verdict.NOT_ENOUGH_EVIDENCE: "No correction is offered on so little evidence. What was measured on each operand is "
    "under the selected layer.",
}


def describe(spelling: str) -> str:
    """Return the field's words for a correction, or its spelling where this version does not know it."""
    try:
        correction = Correction.parse(spelling)
    except ValueError:
        return spelling
    return _WORDS[correction.kind].format(correction.parameter)


def section(recommendation: Recommendation) -> Markup:
    """Return the card: a row per correction, or why there is none."""
    if not recommendation.corrections:
        why = _NONE_SCORED.get(recommendation.verdict, "No correction was scored: there are no what-ifs to score.")
        return render("note.html", title="What would help", text=why, id="help")
    low = min(0.0, *[max(-1.0, _low(score)) for score in recommendation.corrections])
    chosen = recommendation.chosen
    rows = [_row(score, low, is_chosen=score.correction in chosen) for score in recommendation.corrections]
    return render("corrections.html", rows=rows)


def _row(score: CorrectionScore, low: float, *, is_chosen: bool) -> dict[str, Any]:
    """Return what the template shows of a score. Places are in percent of an axis from `low` to 1, cut at its ends."""

    def at(gain: float) -> str:
        return f"{2 + 96 * (min(max(gain, low), 1.0) - low) / (1.0 - low):.2f}%"

    tags = {
        "recommended": is_chosen,
        "already on": score.is_active,
        "cures": score.cures,
        "leaves the format": score.tier > 1,
        "Pareto": score.is_pareto,
    }
    is_bounded = math.isfinite(score.gain_low) and math.isfinite(score.gain_high)
    return {
        "score": score,
        "words": describe(score.correction),
        "is_chosen": is_chosen,
        "gain": interval(score.gain, score.gain_low, score.gain_high, fixed),
        "zero": at(0),
        "at": at(score.gain) if math.isfinite(score.gain) else None,
        "ends": (at(score.gain_low), at(score.gain_high)) if is_bounded else None,
        "tags": [text for text, applies in tags.items() if applies],
    }


def _low(score: CorrectionScore) -> float:
    return min(score.gain, score.gain_low) if math.isfinite(score.gain_low) else score.gain
