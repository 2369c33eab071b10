"""What would help: every correction scored on the named operands, with interval, recovery and cost."""

import math
from collections.abc import Sequence

from mxprobe.attribution import CorrectionScore, Recommendation
from mxprobe.schema import Verdict
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from .markup import Html, basis, card, join, link, percent, scope, tag
from .verdict import gain_text, short

_WORDS: dict[CorrectionKind, str] = {
    CorrectionKind.RULE: "scale rule {}",
    CorrectionKind.MACRO_BLOCK_SCALING: "macro-block scaling over {}",
    CorrectionKind.OUTLIER_FALLBACK: "outlier fallback, α = {}",
    CorrectionKind.HADAMARD: "Hadamard rotation of {}",
    CorrectionKind.CHANNEL_RESIDUAL: "second pass on {:g} % of the channels",
    CorrectionKind.STOCHASTIC: "stochastic rounding",
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
    """The field's words for a correction; the spelling itself when this version does not know it."""
    try:
        correction = Correction.parse(spelling)
    except ValueError:
        return spelling
    return _WORDS[correction.kind].format(correction.parameter)


def section(recommendation: Recommendation) -> Html:
    kind = tag(
        "span",
        scope("steps", "rank", "operands"),
        basis("measured", "on the named operands"),
        basis("predicted", "costs and cures"),
        link("whatifs-title", "by operand"),
        class_="bases",
    )
    if not recommendation.corrections:
        why = _NONE_SCORED.get(recommendation.verdict, "No correction was scored: there are no what-ifs to score.")
        return card("What would help", tag("p", why, class_="note"), id="help")
    low = min(0.0, *[max(-1.0, _low(score)) for score in recommendation.corrections])
    head = [
        tag("th", "correction", scope="col"),
        tag("th", "part of the output error removed", scope="col", style="width: 22%"),
        *[tag("th", name, scope="col", class_="num", title=title) for name, title in _NUMERIC],
        tag("th", "", scope="col"),
    ]
    body = join([_row(score, recommendation, low) for score in recommendation.corrections])
    content = tag(
        "div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", body), class_="compact"), class_="scroll"
    )
    return card("What would help", content, id="help", kind=kind)


_NUMERIC: Sequence[tuple[str, str]] = (
    ("gain [95 %]", "1 − output error left / output error, interval over probed steps"),
    ("held out", "gain on the half of the steps that did not choose"),
    ("recovery", "part of the named component mended in the GEMM output"),
    ("extra GEMM", "passes of the GEMM it is applied to, estimated"),
    ("bits", "per element"),
    ("engine", "whether the framework of the snippet has an option for it"),
)


def _row(score: CorrectionScore, recommendation: Recommendation, low: float) -> Html:
    tags = [
        ("recommended", score.correction in recommendation.chosen),
        ("already on", score.is_active),
        ("cures", score.cures),
        ("leaves the format", score.tier > 1),
        ("Pareto", score.is_pareto),
    ]
    marks = [tag("span", text, class_="tag") for text, applies in tags if applies]
    numbers = [
        gain_text(score),
        "–" if score.held_out_gain is None else short(score.held_out_gain),
        percent(score.recovery),
        f"{score.cost_gemm:.2g}",
        f"{score.bits_per_element:.4g}",
        {True: "has it", False: "no", None: "–"}[score.engine_has_it],
    ]
    name = [describe(score.correction), tag("code", score.correction)]
    note = tag("span", score.note, class_="side") if score.note else ""
    return tag(
        "tr",
        tag("td", *name, class_="what"),
        tag("td", _forest(score, low)),
        *[tag("td", text, class_="num") for text in numbers],
        tag("td", *marks, note, class_="tags", title=score.note or None),
        class_="named" if score.correction in recommendation.chosen else None,
    )


def _low(score: CorrectionScore) -> float:
    return min(score.gain, score.gain_low) if math.isfinite(score.gain_low) else score.gain


def _forest(score: CorrectionScore, low: float) -> Html:
    """Point and interval on a common axis from `low` to 1, zero marked; values beyond are drawn at the edge."""
    if not math.isfinite(score.gain):
        return Html("–")

    def at(value: float) -> str:
        return f"{2 + 96 * (min(max(value, low), 1.0) - low) / (1.0 - low):.2f}%"

    zero = tag("line", x1=at(0), x2=at(0), y1="0", y2="20", stroke="var(--line)")
    axis = tag("line", x1="0", x2="100%", y1="10", y2="10", stroke="var(--grid-line)")
    interval = Html("")
    if math.isfinite(score.gain_low) and math.isfinite(score.gain_high):
        interval = tag(
            "line",
            x1=at(score.gain_low),
            x2=at(score.gain_high),
            y1="10",
            y2="10",
            stroke="var(--soft)",
            stroke_width="3",
        )
    color = "var(--ink)" if score.is_eligible else "var(--faint)"
    point = tag("circle", cx=at(score.gain), cy="10", r="4.5", fill=color)
    label = f"gain {gain_text(score)}"
    return tag("svg", axis, zero, interval, point, class_="forest", role="img", aria_label=label)
