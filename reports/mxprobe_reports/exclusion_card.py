"""What keeping modules out of MXFP4 would buy, one after the other."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from mxprobe.attribution.exclusion import DELTA2, OUTPUT_ERROR, ExclusionCurve

from .rendering import render

_LEFT_BY = {
    DELTA2: " What stays in the kept modules is the Δ² of their own error in that format.",
    OUTPUT_ERROR: " What stays in the kept modules is guessed from output errors: the trace has no Δ² of that format.",
}


def section(curves: Sequence[ExclusionCurve]) -> Markup:
    """Return nothing where no sensitivity was measured: *Where it hurts* says so."""
    return render("exclusion.html", curves=curves, left_by=_LEFT_BY) if curves else Markup()


def page_data(curves: Sequence[ExclusionCurve]) -> list[dict[str, Any]]:
    """Return one line per way of keeping, for page.js."""
    return [
        {
            "label": f"kept in {curve.kept_in}",
            "knee": curve.knee,
            "module": [point.module for point in curve.points],
            "work": [point.flops_frac for point in curve.points],
            "kl": [point.predicted_kl for point in curve.points],
        }
        for curve in curves
    ]
