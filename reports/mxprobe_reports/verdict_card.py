"""The top of the page: what is wrong, how sure that is, what to switch on, and what would change the answer."""

from markupsafe import Markup

from mxprobe.attribution import Evidence, Recommendation
from mxprobe.numbers import fixed, percent
from mxprobe.schema import Component, Verdict

from .rendering import render

_ACCENT = {
    Component.SCALE: "var(--scale)",
    Component.DEADZONE: "var(--deadzone)",
    Component.GRID: "var(--grid)",
    Component.SATURATION: "var(--saturation)",
}

_COLOURED = (Verdict.ENABLE, Verdict.UNDECIDED, Verdict.KEEP_HIGH_PRECISION)
"""Verdicts that blame a component, whose colour the card then takes."""
_FRAMEWORKS = {"trl": "TRL", "transformers": "Transformers", "torch": "PyTorch"}


def section(recommendation: Recommendation, *, has_log_probs: bool = False) -> Markup:
    """Return the card. `has_log_probs`: the page has a section of log-probabilities to link to."""
    names_component = recommendation.verdict in _COLOURED
    snippet = recommendation.snippet
    return render(
        "verdict.html",
        recommendation=recommendation,
        accent=_ACCENT.get(recommendation.component) if names_component else None,
        places=_places(recommendation),
        facts=_facts(recommendation),
        evidence=[(each, _place(each, has_log_probs=has_log_probs)) for each in recommendation.evidence],
        framework=_FRAMEWORKS.get(snippet.framework, snippet.framework) if snippet else "",
    )


def _places(recommendation: Recommendation) -> list[tuple[str, str]]:
    """Return where the data behind the sentence is: (id of a section, text)."""
    if recommendation.verdict is Verdict.NOT_ENOUGH_EVIDENCE or not recommendation.evidence:
        return []
    places = [("evidence", "evidence"), ("error", "where")]
    return [*places, ("help", "corrections")] if recommendation.chosen else places


def _facts(recommendation: Recommendation) -> list[tuple[str, str, str, str]]:
    """Return name, section with the data, value, and what stands below it."""
    agreement, coverage = recommendation.agreement, recommendation.coverage
    facts: list[tuple[str, str, str, str]] = []
    chosen = recommendation.chosen[:1]
    for best in [score for score in recommendation.corrections if score.correction in chosen]:
        measured = f"measured, 95 %: {fixed(best.gain_low)} to {fixed(best.gain_high)}"
        bits = f"predicted, {best.bits_per_element:g} bits a value"
        facts.append((f"Gain of {best.correction}", "help", fixed(best.gain), measured))
        facts.append(("Extra cost", "help", f"{best.cost_gemm:g} GEMM", bits))
    steps = f"measured, {agreement.n} probed step{'' if agreement.n == 1 else 's'}"
    facts.append(("Resample agreement", "methods", fixed(agreement.value), steps))
    seen = f"measured, {coverage.n_probed} of {coverage.n_modules} modules"
    facts.append(("GEMM work seen", "coverage", percent(coverage.flops_frac), seen))
    return facts


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


def _place(evidence: Evidence, *, has_log_probs: bool) -> str:
    """Return the section with the data of a piece of evidence; "" for none."""
    place = next((id for start, id in _DATA_OF if evidence.name.startswith(start)), "")
    return "signals" if place == "rollouts" and not has_log_probs else place
