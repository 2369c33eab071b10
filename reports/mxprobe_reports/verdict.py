"""The top of the page: what is wrong, how sure that is, what to switch on, and what would change the answer."""

import math

from mxprobe.attribution import CorrectionScore, Evidence, Recommendation
from mxprobe.schema import Component, Verdict

from .markup import Html, basis, join, number, percent, table, tag

_ACCENT = {
    Component.SCALE: "var(--scale)",
    Component.DEADZONE: "var(--deadzone)",
    Component.GRID: "var(--grid)",
    Component.SATURATION: "var(--saturation)",
}

_COLOURED = (Verdict.ENABLE, Verdict.UNDECIDED, Verdict.KEEP_HIGH_PRECISION)
"""Verdicts that blame a component, whose colour the card then takes."""
_FRAMEWORKS = {"trl": "TRL", "transformers": "Transformers", "torch": "PyTorch"}


def section(recommendation: Recommendation) -> Html:
    names_component = recommendation.verdict in _COLOURED
    accent = _ACCENT.get(recommendation.component) if names_component else None
    words = tag("p", "Verdict: ", tag("b", recommendation.plain_words), class_="plain")
    sentence = tag("h1", recommendation.headline)
    change = (
        tag("p", tag("b", "What would change this. "), recommendation.what_would_change, class_="change")
        if recommendation.what_would_change
        else ""
    )
    left = tag("div", words, sentence, change)
    body = tag("div", left, _facts(recommendation), class_="body")
    drawers = tag(
        "div", _snippet(recommendation), _evidence(recommendation), _caveats(recommendation), class_="drawers"
    )
    style = f"--accent: {accent}" if accent else None
    return tag("section", body, drawers, class_="card verdict", id="verdict", style=style)


def favourite(recommendation: Recommendation) -> CorrectionScore | None:
    """The score of the first chosen correction."""
    if not recommendation.chosen:
        return None
    return next((c for c in recommendation.corrections if c.correction == recommendation.chosen[0]), None)


def _facts(recommendation: Recommendation) -> Html:
    agreement = recommendation.agreement
    facts: list[tuple[str, str, str]] = []
    best = favourite(recommendation)
    if best is not None:
        interval = f"95 % interval {short(best.gain_low)} to {short(best.gain_high)}"
        facts.append((f"Gain of {best.correction}, measured", short(best.gain), interval))
        facts.append(("Cost, estimated", f"{best.cost_gemm:g} GEMM", f"{best.bits_per_element:g} bits per element"))
    value = "–" if agreement.value is None else f"{agreement.value:.2f}"
    steps = f"{agreement.n} probed step{'' if agreement.n == 1 else 's'}"
    facts.append(("Resample agreement", value, steps))
    coverage = recommendation.coverage
    seen = "–" if coverage.flops_frac is None else percent(coverage.flops_frac)
    facts.append(("GEMM work seen", seen, f"{coverage.n_probed} of {coverage.n_modules} modules"))
    return tag(
        "dl",
        *[tag("div", tag("dt", name), tag("dd", value, tag("small", small))) for name, value, small in facts],
        class_="facts",
    )


def _snippet(recommendation: Recommendation) -> Html:
    snippet = recommendation.snippet
    if snippet is None:
        return Html("")
    copy = tag("button", "Copy", type="button", data_copy="snippet")
    code = tag("div", tag("pre", tag("code", snippet.text), id="snippet", tabindex="0"), copy, class_="code")
    return tag("details", tag("summary", f"Snippet for {_FRAMEWORKS.get(snippet.framework, snippet.framework)}"), code)


def _evidence(recommendation: Recommendation) -> Html:
    if not recommendation.evidence:
        return Html("")
    rows = [_row(evidence) for evidence in recommendation.evidence]
    content = table(["evidence", "value", "threshold", "", "basis"], rows, numeric=(1, 2))
    note = tag(
        "p",
        "“Reached” says on which side of its threshold a fact lies. It is no judgement: a mismatch that does not reach "
        "its threshold is good news.",
        class_="note",
    )
    return tag("details", tag("summary", f"Evidence ({len(rows)})"), content, note)


def _row(evidence: Evidence) -> list[object]:
    side = {True: "reached", False: "not reached", None: ""}[evidence.holds]
    numbers = ["" if v is None else number(v) for v in (evidence.value, evidence.threshold)]
    kind = basis(str(evidence.certainty).split()[0])
    return [evidence.text, *numbers, tag("span", side, class_="gate"), kind]


def _caveats(recommendation: Recommendation) -> Html:
    if not recommendation.caveats:
        return Html("")
    items = join([tag("li", caveat) for caveat in recommendation.caveats])
    return tag("details", tag("summary", f"Caveats ({len(recommendation.caveats)})"), tag("ul", items, class_="prose"))


def short(value: float) -> str:
    """Two decimals and a true minus sign: what the uncertainty of a gain allows."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def gain_text(score: CorrectionScore) -> str:
    """`0.71 [0.64, 0.77]`; the interval is left out where there is none."""
    if not (math.isfinite(score.gain_low) and math.isfinite(score.gain_high)):
        return short(score.gain)
    return f"{short(score.gain)} [{short(score.gain_low)}, {short(score.gain_high)}]"
