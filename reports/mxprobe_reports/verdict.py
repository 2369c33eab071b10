"""The top of the page: what is wrong, how sure that is, what to switch on, and what would change the answer."""

import math

from mxprobe.attribution import CorrectionScore, Evidence, Recommendation
from mxprobe.schema import Component, Verdict

from .markup import Html, basis, join, link, number, percent, scope, table, tag

_ACCENT = {
    Component.SCALE: "var(--scale)",
    Component.DEADZONE: "var(--deadzone)",
    Component.GRID: "var(--grid)",
    Component.SATURATION: "var(--saturation)",
}

_COLOURED = (Verdict.ENABLE, Verdict.UNDECIDED, Verdict.KEEP_HIGH_PRECISION)
"""Verdicts that blame a component, whose colour the card then takes."""
_FRAMEWORKS = {"trl": "TRL", "transformers": "Transformers", "torch": "PyTorch"}


def section(recommendation: Recommendation, *, has_log_probs: bool = False) -> Html:
    names_component = recommendation.verdict in _COLOURED
    accent = _ACCENT.get(recommendation.component) if names_component else None
    words = tag("p", "Verdict: ", tag("b", recommendation.plain_words), *_basis(recommendation), class_="plain")
    sentence = tag("h1", recommendation.headline)
    change = (
        tag("p", tag("b", "What would change this. "), recommendation.what_would_change, class_="change")
        if recommendation.what_would_change
        else ""
    )
    left = tag("div", words, sentence, change)
    body = tag("div", left, _facts(recommendation), class_="body")
    drawers = tag(
        "div",
        _snippet(recommendation),
        _evidence(recommendation, has_log_probs=has_log_probs),
        _caveats(recommendation),
        scope("steps", "rank", "operands"),
        class_="drawers",
    )
    style = f"--accent: {accent}" if accent else None
    return tag("section", body, drawers, class_="card verdict", id="verdict", style=style)


def _basis(recommendation: Recommendation) -> list[Html | str]:
    """How the sentence came about, and where the data behind it is."""
    if recommendation.verdict is Verdict.NOT_ENOUGH_EVIDENCE or not recommendation.evidence:
        return []
    places = [
        ("evidence", "evidence"),
        ("error", "where"),
        *([("help", "corrections")] if recommendation.chosen else []),
    ]
    return [" ", basis("measured"), *[Html(f" · {link(id, text)}") for id, text in places]]


def favourite(recommendation: Recommendation) -> CorrectionScore | None:
    """The score of the first chosen correction."""
    if not recommendation.chosen:
        return None
    return next((c for c in recommendation.corrections if c.correction == recommendation.chosen[0]), None)


def _facts(recommendation: Recommendation) -> Html:
    agreement = recommendation.agreement
    facts: list[tuple[str, str, str, str]] = []
    best = favourite(recommendation)
    if best is not None:
        interval = f"measured, 95 %: {short(best.gain_low)} to {short(best.gain_high)}"
        bits = f"predicted, {best.bits_per_element:g} bits a value"
        facts.append((f"Gain of {best.correction}", "help", short(best.gain), interval))
        facts.append(("Extra cost", "help", f"{best.cost_gemm:g} GEMM", bits))
    value = "–" if agreement.value is None else f"{agreement.value:.2f}"
    steps = f"measured, {agreement.n} probed step{'' if agreement.n == 1 else 's'}"
    facts.append(("Resample agreement", "methods", value, steps))
    coverage = recommendation.coverage
    seen = "–" if coverage.flops_frac is None else percent(coverage.flops_frac)
    facts.append(("GEMM work seen", "coverage", seen, f"measured, {coverage.n_probed} of {coverage.n_modules} modules"))
    shown = [
        tag("div", tag("dt", link(id, name)), tag("dd", value, tag("small", small))) for name, id, value, small in facts
    ]
    return tag("dl", *shown, class_="facts")


def _snippet(recommendation: Recommendation) -> Html:
    snippet = recommendation.snippet
    if snippet is None:
        return Html("")
    copy = tag("button", "Copy", type="button", data_copy="snippet")
    code = tag("div", tag("pre", tag("code", snippet.text), id="snippet", tabindex="0"), copy, class_="code")
    return tag("details", tag("summary", f"Snippet for {_FRAMEWORKS.get(snippet.framework, snippet.framework)}"), code)


_DATA_OF: tuple[tuple[str, str], ...] = (
    # what the name of a piece of evidence starts with -> the section with its data
    ("coverage", "coverage"),
    ("probed_steps", "quality"),
    ("realised", "realised"),
    ("weight_lag", "realised"),
    ("held_weights", "signals"),
    ("weight_noise", "signals"),
    ("first_divergence", "realised"),
    ("rule_mismatch", "realised"),
    ("log_prob", "rollouts"),
    ("effective", "rollouts"),  # sample size, temperature
    ("mismatch_explained", "rollouts"),
    ("mismatch_of_far", "realised"),
    ("mismatch", "signals"),
    ("trend", "signals"),
    ("component", "error"),
    ("where", "error"),
    ("backward", "depth"),
)


def _evidence(recommendation: Recommendation, *, has_log_probs: bool) -> Html:
    if not recommendation.evidence:
        return Html("")
    rows = [_row(evidence, has_log_probs=has_log_probs) for evidence in recommendation.evidence]
    content = table(["evidence", "value", "threshold", "", "basis", ""], rows, numeric=(1, 2))
    note = tag(
        "p",
        "“Reached” says on which side of its threshold a fact lies. It is no judgement: a mismatch that does not reach "
        "its threshold is good news.",
        class_="note",
    )
    return tag("details", tag("summary", f"Evidence ({len(rows)})"), content, note, id="evidence")


def _row(evidence: Evidence, *, has_log_probs: bool) -> list[object]:
    side = {True: "reached", False: "not reached", None: ""}[evidence.holds]
    numbers = ["" if v is None else number(v) for v in (evidence.value, evidence.threshold)]
    kind = basis(str(evidence.certainty).split()[0])
    place = next((id for start, id in _DATA_OF if evidence.name.startswith(start)), "")
    if place == "rollouts" and not has_log_probs:
        place = "signals"
    data = link(place, "data") if place else ""
    return [evidence.text, *numbers, tag("span", side, class_="gate"), kind, data]


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
