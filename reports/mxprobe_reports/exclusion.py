"""What keeping modules out of MXFP4 would buy, one after the other, and whether updates reach the quantized weights."""

from typing import Any

from mxprobe.attribution import Recommendation
from mxprobe.attribution.exclusion import BF16, DELTA2, OUTPUT_ERROR, ExclusionCurve
from mxprobe.attribution.words import update_words

from .markup import Html, basis, card, chart, join, number, percent, scope, tag

_KEPT_IN = {BF16: "BF16"}
_LEFT_BY = {
    DELTA2: " What stays in the kept modules is the Δ² of their own error in that format.",
    OUTPUT_ERROR: " What stays in the kept modules is guessed from output errors: the trace has no Δ² of that format.",
}
_FILTERS = ("steps", "rank", "operands")


def section(recommendation: Recommendation) -> Html:
    """Nothing where no sensitivity was measured: *Where it hurts* says so."""
    curves = recommendation.exclusion
    if not curves:
        return Html("")
    figure = chart("exclusion", "Predicted KL that is left against the share of the work kept out", size="wide")
    said = [tag("li", _sentence(curve)) for curve in curves]
    patterns = join([_pattern(curve) for curve in curves if curve.patterns])
    kind = tag("span", scope(*_FILTERS), basis("predicted", "to first order, effects added"), class_="bases")
    body = [tag("ul", *said, class_="prose"), figure, patterns]
    return card("What keeping modules out of MXFP4 would buy", *body, id="exclusion", kind=kind)


def page_data(curves: tuple[ExclusionCurve, ...]) -> list[dict[str, Any]]:
    """For page.js: one line per way of keeping."""
    return [
        {
            "label": f"kept in {_name(curve)}",
            "knee": curve.knee,
            "module": [point.module for point in curve.points],
            "work": [point.flops_frac for point in curve.points],
            "kl": [point.predicted_kl for point in curve.points],
        }
        for curve in curves
    ]


def _name(curve: ExclusionCurve) -> str:
    return _KEPT_IN.get(curve.keep, curve.keep.upper())


def _sentence(curve: ExclusionCurve) -> str:
    whole, knee = curve.points[0], curve.points[curve.knee]
    if not curve.knee:
        return f"In {_name(curve)}: no module buys more than its share of the work."
    before, after = number(whole.predicted_kl), number(knee.predicted_kl)
    return (
        f"In {_name(curve)}: {curve.knee} of {len(curve.points) - 1} modules, {percent(knee.flops_frac)} of their "
        f"forward GEMM work, take the predicted KL from {before} to {after} nats a token (the knee; "
        f"{curve.n_microbatches} replayed microbatches).{_LEFT_BY.get(curve.left_by, '')}"
    )


def _pattern(curve: ExclusionCurve) -> Html:
    summary = tag("summary", f"The modules up to the knee, kept in {_name(curve)}, as {curve.framework} spells them")
    return tag("details", summary, tag("pre", tag("code", "\n".join(curve.patterns)), tabindex="0"))


def updates_section(recommendation: Recommendation) -> Html:
    """Nothing where no two versions of a weight were compared."""
    if recommendation.updates is None:
        return Html("")
    kind = tag("span", scope(*_FILTERS), basis("measured"), class_="bases")
    text = tag("p", update_words(recommendation.updates))
    return card("Do updates reach the quantized weights?", text, id="updates", kind=kind)
