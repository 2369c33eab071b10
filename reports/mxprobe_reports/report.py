"""A report: first the maths on the frames (`Report.of`), then the page (`render`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mxprobe.attribution import Recommendation
from mxprobe.trace import Trace

from . import (
    corrections,
    coverage,
    errors,
    explorer,
    layers,
    methods,
    overhead,
    provenance,
    quality,
    realised,
    shell,
    symptoms,
    verdict,
)
from .inputs import Inputs
from .markup import card, join, tag
from .operands import Operands, collect, page_names


@dataclass(frozen=True)
class Report:
    """Everything the page shows, computed; `render` only writes it down."""

    inputs: Inputs
    operands: Operands
    columns: pd.DataFrame
    signals: list[symptoms.Signal]
    outputs: list[dict[str, Any]]

    @classmethod
    def of(cls, inputs: Inputs) -> "Report":
        modules = page_names((inputs.tensors, inputs.outputs), inputs.modules)
        operands = collect(inputs.tensors, modules)
        return cls(
            inputs=inputs,
            operands=operands,
            columns=explorer.columns(operands),
            signals=symptoms.headline_signals(inputs),
            outputs=realised.page_data(inputs.outputs, modules),
        )

    @property
    def problems(self) -> list[str]:
        """What a reader must know before trusting the page, in sentences."""
        return quality.problems(self.inputs, self.operands)

    def render(self, *, command_line: str = "") -> str:
        """The HTML document, self-contained."""
        inputs, recommendation = self.inputs, self.inputs.recommendation
        body = join(
            [
                verdict.section(recommendation),
                symptoms.section(self.signals),
                errors.section(self.operands, self.columns, recommendation.component, recommendation.verdict),
                corrections.section(recommendation),
                layers.selected(self.operands),
                layers.all_layers(self.operands),
                realised.section(self.outputs, recommendation.thresholds),
                tag(
                    "div",
                    coverage.section(recommendation, inputs.modules),
                    overhead.section(overhead.of(inputs.overhead, inputs.run)),
                    class_="row two",
                    id="coverage",
                ),
                quality.section(inputs, self.operands),
                card("All signals", symptoms.all_signals(inputs), id="all-signals", class_="long"),
                methods.section(self.operands, recommendation.thresholds),
                provenance.section(inputs, command_line),
            ],
            "\n",
        )
        return shell.render(inputs.name, provenance.headline(inputs), body, self.page_data())

    def page_data(self) -> dict[str, Any]:
        """What page.js reads: packed numbers and names."""
        marks = self.inputs.events[self.inputs.events["kind"].astype(str).isin(MARKED_EVENTS).to_numpy()]
        return {
            **explorer.page_data(self.operands, self.inputs.whatif, self.inputs.tensors),
            "signals": symptoms.page_data(self.signals),
            "outputs": self.outputs,
            "events": [
                {"step": int(step), "kind": str(kind)}
                for step, kind in zip(marks["step"], marks["kind"], strict=True)
                if pd.notna(step)
            ],
        }

    def summary(self) -> dict[str, Any]:
        """Counts for `--json`."""
        coverage_frac = self.inputs.recommendation.coverage.flops_frac
        return {
            "trace": self.inputs.name,
            "verdict": str(self.inputs.recommendation.verdict),
            "plain_words": self.inputs.recommendation.plain_words,
            "n_probed_steps": self.operands.n_probed_steps,
            "n_displayed_steps": len(self.operands.steps),
            "n_modules": len(self.operands.modules),
            "n_operands": len(self.operands.totals),
            "n_signals": sum(len(signal.steps) > 0 for signal in self.signals),
            "coverage_flops_frac": coverage_frac,
            "problems": self.problems,
        }


MARKED_EVENTS = ("attached", "detached", "nonfinite", "error")


def build_report(trace: Trace, recommendation: Recommendation) -> Report:
    return Report.of(Inputs.from_trace(trace, recommendation))


def write_report(trace: Trace, recommendation: Recommendation, path: Path, *, command_line: str = "") -> Report:
    """Write the page to `path`, whole or not at all. OSError when the place cannot be written."""
    report = build_report(trace, recommendation)
    text = report.render(command_line=command_line)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return report
