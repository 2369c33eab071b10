"""B relative to A: what was different, what changed, and whether the correction did what was predicted."""

import html
import math
from dataclasses import dataclass, replace
from typing import Any

from mxprobe.attribution.thresholds import Thresholds
from mxprobe.attribution.words import correction_words
from mxprobe.numbers import interval, number, signed
from mxprobe.plain_data import plain_data
from mxprobe.trace import Trace

from .alignment import Alignment, align
from .levels import ErrorChange, SignalChange, error_changes, signal_changes
from .prediction import Outcome, PredictionCheck, SymptomChange, check_prediction
from .provenance import ConfigChange, config_changes

JSON_SCHEMA = "mxprobe.compare/1"


@dataclass(frozen=True)
class Comparison:
    """All that `mxprobe compare` says. Numbers are measured unless they are called predicted."""

    a: str
    b: str
    headline: str
    alignment: Alignment
    config: tuple[ConfigChange, ...]
    prediction: PredictionCheck
    symptom: SymptomChange | None
    signals: tuple[SignalChange, ...]
    errors: tuple[ErrorChange, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: numbers that are not finite are null."""
        return {"schema": JSON_SCHEMA, **plain_data(self)}

    def _repr_html_(self) -> str:
        """For notebooks: the headline, the prediction, and the metrics that changed clearly."""
        rows = "".join(
            f"<tr><td>{html.escape(each.metric)}</td><td>{number(each.a.mean)}</td><td>{number(each.b.mean)}</td>"
            f"<td>{interval(each.change.difference, each.change.low, each.change.high, signed)}</td></tr>"
            for each in self.signals
            if each.change.is_clear
        )
        n_clear = sum(each.is_clear for each in self.errors)
        head = "<tr><th>metric</th><th>A</th><th>B</th><th>B − A [95 %]</th></tr>"
        return (
            f"<p><b>{html.escape(self.headline)}</b></p><p>{html.escape(self.prediction.text)}</p>"
            f"<p>A {html.escape(self.a)}<br>B {html.escape(self.b)}</p>"
            + (f"<table>{head}{rows}</table>" if rows else "")
            + f"<p>{n_clear} of {len(self.errors)} errors changed clearly.</p>"
        )


def compare(a: Trace, b: Trace, thresholds: Thresholds | None = None) -> Comparison:
    """Compare two traces, B relative to A.

    Raises:
        UsageError: they have no module, shape or phase in common, or nothing was probed in one.
        TraceError: a table cannot be read.
    """
    alignment = align(a, b)
    prediction, symptom = check_prediction(a, b, alignment, thresholds or Thresholds())
    signals, errors = signal_changes(a, b, alignment), error_changes(a, b, alignment)
    alignment = replace(alignment, warnings=(*alignment.warnings, *_not_finite(errors)))
    return Comparison(
        a=str(a.directory),
        b=str(b.directory),
        headline=_headline(prediction, symptom, signals),
        alignment=alignment,
        config=config_changes(a, b, alignment),
        prediction=prediction,
        symptom=symptom,
        signals=signals,
        errors=errors,
    )


def _not_finite(errors: tuple[ErrorChange, ...]) -> list[str]:
    """A run whose errors are all NaN must not read as one in which nothing changed."""
    energies = [each for each in errors if each.measure != "zero_frac"]
    sides = {"A": [each.a for each in energies], "B": [each.b for each in energies]}
    return [
        f"No error of {side} is a finite number: nothing can be said about what changed in them."
        for side, values in sides.items()
        if values and not any(math.isfinite(value) for value in values)
    ]


def _headline(prediction: PredictionCheck, symptom: SymptomChange | None, signals: tuple[SignalChange, ...]) -> str:
    sentences: list[str] = []
    if prediction.outcome not in (Outcome.NOT_PREDICTED, Outcome.NOT_SWITCHED_ON, Outcome.NOT_MEASURED):
        words = correction_words(prediction.correction)
        sentences.append(f"{words[0].upper()}{words[1:]} {prediction.outcome}.")
    if symptom is not None and (symptom.was_symptom or symptom.is_symptom):
        over = "still over" if symptom.was_symptom and symptom.is_symptom else "over" if symptom.is_symptom else "under"
        sentences.append(
            f"The mismatch of rollout and training went from {number(symptom.a)} to {number(symptom.b)}, {over} its "
            f"gate of {number(symptom.gate_b)}."
        )
    reward = next((each for each in signals if each.metric == "reward_mean"), None)
    if reward is not None:
        change = reward.change
        moved = "rose" if change.difference > 0 else "fell"
        said = f"{moved} by {number(abs(change.difference))}" if change.is_clear else "did not change clearly"
        sentences.append(f"The reward {said}: {number(reward.a.mean)} to {number(reward.b.mean)}.")
    return " ".join(sentences) or "Nothing that both runs measured tells them apart."
