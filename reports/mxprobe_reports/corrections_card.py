"""What would help: every correction scored on the named operands, with interval, recovery and cost."""

import math
from typing import Any

from markupsafe import Markup

from mxprobe.attribution import CorrectionScore, Recommendation
from mxprobe.attribution.words import correction_words
from mxprobe.numbers import fixed, interval
from mxprobe.schema import Verdict

from .rendering import render

_NONE_SCORED: dict[Verdict, str] = {
    Verdict.NOT_EXPLAINED: "No correction is offered: what the run shows is not rounding, so mending the rounding "
    "would not mend the run. What was measured on each operand is under the selected layer.",
    Verdict.NOT_ENOUGH_EVIDENCE: "No correction is offered on so little evidence. What was measured on each operand is "
    "under the selected layer.",
}


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
        "words": correction_words(score.correction),
        "is_chosen": is_chosen,
        "gain": interval(score.gain, score.gain_low, score.gain_high, fixed),
        "zero": at(0),
        "at": at(score.gain) if math.isfinite(score.gain) else None,
        "ends": (at(score.gain_low), at(score.gain_high)) if is_bounded else None,
        "tags": [text for text, applies in tags.items() if applies],
    }


def _low(score: CorrectionScore) -> float:
    return min(score.gain, score.gain_low) if math.isfinite(score.gain_low) else score.gain
