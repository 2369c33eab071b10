"""A report: first the maths on the tables (`Report.of`), then the page (`render`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import Recommendation
from mxprobe.attribution.words import update_words
from mxprobe.comparison import Comparison
from mxprobe.trace import Trace

from . import (
    against,
    claims,
    corrections_card,
    coverage_card,
    depth,
    error_cards,
    exclusion_card,
    experts_card,
    explorer,
    gradient_errors,
    layers,
    logprobs,
    methods,
    operands,
    outputs,
    overhead_card,
    quality,
    realised,
    shell,
    symptoms,
    verdict_card,
    versions_card,
)
from .against import Against
from .inputs import Inputs
from .operands import Operands, Scan
from .rendering import render
from .sensitivities import Sensitivities


@dataclass(frozen=True)
class Report:
    """Everything the page shows, computed; `render` only writes it down."""

    inputs: Inputs
    seen: Scan
    operands: Operands
    columns: pd.DataFrame
    signals: list[symptoms.Signal]
    outputs: list[dict[str, Any]]
    gradients: pd.DataFrame
    sensitivities: Sensitivities | None
    against: Against | None = None

    @classmethod
    def of(cls, inputs: Inputs, *, b: tuple[Inputs, Comparison] | None = None) -> "Report":
        """Read the tables. `b` is a second run and the comparison of the two, to lay over the first."""
        seen = operands.scan(inputs.tensors)
        named = list(dict.fromkeys([*seen.modules, *outputs.modules_of(inputs.outputs)]))
        modules = operands.page_names(named, inputs.modules)
        collected = operands.collect(inputs.tensors, seen, modules, n_pages=1 if b is None else 2)
        layer_outputs = outputs.collect(inputs.outputs, modules)
        sensitivities = Sensitivities.of(inputs.sensitivity, inputs.replays, collected)
        return cls(
            inputs=inputs,
            seen=seen,
            operands=collected,
            columns=explorer.columns(collected, sensitivities),
            signals=symptoms.headline_signals(inputs, layer_outputs.mismatch),
            outputs=realised.page_data(layer_outputs),
            gradients=gradient_errors.collect(inputs.gradients, modules),
            sensitivities=sensitivities,
            against=None if b is None else Against.of(*b, collected),
        )

    @property
    def problems(self) -> list[str]:
        """What a reader must know before trusting the page, in sentences."""
        return quality.problems(self.inputs, self.operands)

    def render(self, *, command_line: str = "") -> str:
        """Return the HTML document, self-contained."""
        inputs, recommendation = self.inputs, self.inputs.recommendation
        log_probabilities = logprobs.section(inputs.rollouts)
        sections = [
            verdict_card.section(recommendation, has_log_probs=bool(log_probabilities)),
            Markup() if self.against is None else against.section(self.against, inputs.name),
            symptoms.section(self.signals),
            error_cards.section(
                self.operands,
                self.columns,
                recommendation.component,
                recommendation.verdict,
                sensitivities=self.sensitivities,
                has_b=self.against is not None,
            ),
            corrections_card.section(recommendation),
            exclusion_card.section(recommendation.exclusion),
            layers.section(self.operands),
            realised.section(self.outputs, recommendation.thresholds),
            log_probabilities,
            experts_card.section(inputs.mixture),
            _updates(recommendation),
            depth.section(self.operands, self.gradients),
            claims.section(self.operands, recommendation, self.signals, has_noise=not self.gradients.empty),
            Markup('<div class="row two" id="coverage">{}{}</div>').format(
                coverage_card.section(recommendation, inputs.modules), overhead_card.section(self._overhead())
            ),
            quality.section(inputs, self.operands),
            symptoms.all_signals(inputs.signals),
            methods.section(self.operands, recommendation.thresholds),
            versions_card.section(inputs, command_line),
        ]
        facts = versions_card.headline(inputs, self.operands.binned.steps)
        controls = layers.range_controls(self.operands)
        return shell.page(inputs.name, facts, sections, self.page_data(), controls=controls)

    def _overhead(self) -> overhead_card.Overhead:
        replayed = {name: getattr(self.inputs, name)["step"].unique() for name in ("sensitivity", "replays")}
        return overhead_card.of(self.inputs.overhead, self.inputs.run, **replayed)

    def page_data(self) -> dict[str, Any]:
        """Return what page.js reads: packed numbers and names."""
        return {
            **explorer.page_data(
                self.operands,
                self.seen,
                self.inputs.whatif,
                self.inputs.tensors,
                sensitivities=self.sensitivities,
                b_error=None if self.against is None else self.against.error,
            ),
            "gradients": gradient_errors.page_data(self.gradients),
            "exclusion": exclusion_card.page_data(self.inputs.recommendation.exclusion),
            "signals": symptoms.page_data(self.signals, () if self.against is None else self.against.signals),
            "outputs": self.outputs,
            "against": None if self.against is None else self.against.page_data(self.operands),
            "events": symptoms.marked_events(self.inputs.events),
        }

    def summary(self) -> dict[str, Any]:
        """Return counts for `--json`."""
        coverage_frac = self.inputs.recommendation.coverage.flops_frac
        return {
            "trace": self.inputs.name,
            "against": None if self.against is None else self.against.name,
            "verdict": str(self.inputs.recommendation.verdict),
            "plain_words": self.inputs.recommendation.plain_words,
            "n_probed_steps": self.operands.n_probed_steps,
            "n_displayed_steps": len(self.operands.binned.steps),
            "n_modules": len(self.operands.modules),
            "n_operands": len(self.operands.totals),
            "n_signals": sum(len(signal.steps) > 0 for signal in self.signals),
            "coverage_flops_frac": coverage_frac,
            "problems": self.problems,
        }


def _updates(recommendation: Recommendation) -> Markup:
    """Say whether updates reach the quantized weights; nothing where no two versions of a weight were compared."""
    seen = recommendation.updates
    return Markup() if seen is None else render("updates.html", text=update_words(seen))


def write_report(
    trace: Trace,
    recommendation: Recommendation,
    path: Path,
    *,
    command_line: str = "",
    b: tuple[Trace, Recommendation, Comparison] | None = None,
) -> Report:
    """Write the page of a trace to `path`, whole or not at all; B is laid over it where there is one.

    Raises:
        OSError: the place cannot be written.
    """
    other = None if b is None else (Inputs.from_trace(b[0], b[1]), b[2])
    report = Report.of(Inputs.from_trace(trace, recommendation), b=other)
    shell.write(path, report.render(command_line=command_line))
    return report
