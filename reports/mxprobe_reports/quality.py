"""What a reader must know before trusting the numbers: problems, losses, identity, sampling."""

import pandas as pd
from markupsafe import Markup

from mxprobe.events import RANK_LOST
from mxprobe.numbers import NOTHING, percent
from mxprobe.trace.event_facts import events_of

from . import ranks
from .inputs import Inputs
from .operands import Operands
from .rendering import render

FEW_CLUSTERS = 64
"""Sampling units below which an operand's numbers are noisy."""
MAX_EVENTS = 60


def problems(inputs: Inputs, operands: Operands) -> list[str]:
    """Return sentences, the gravest first; empty when nothing is wrong."""
    found = list(inputs.problems)
    if not operands.n_rows:
        found.append("No operand was measured: the tensors table is empty.")
    if inputs.signals.empty:
        found.append("No training metric was captured.")
    if operands.n_probed_steps == 1:
        found.append("Only one step was probed: nothing can be said about change over time.")
    if operands.n_bad_rows:
        found.append(f"{operands.n_bad_rows} operand rows are left out: a sum in them is missing or not finite.")
    if operands.n_identity_violations:
        found.append(
            f"{operands.n_identity_violations} operand rows violate the identity of the components by more than 1e-5."
        )
    found += _losses(inputs.overhead)
    found += _non_finite(operands)
    found += ranks.sentences(inputs, operands)
    if not inputs.events.empty:
        found += [f"Lost: {event.words}." for _, event in events_of(inputs.events, RANK_LOST)]
    if not inputs.events.empty and (inputs.events["kind"] == "eager").any():
        found.append(
            "Probed steps ran the compiled model eagerly (--eager-probe-steps): the run is not bit for bit what it "
            "would have been, and what was measured is the eager model's."
        )
    if not inputs.events.empty and (inputs.events["kind"] == "planted").any():
        found.append(
            "Operators were planted in the compiled model (mxprobe run --plant-probes): the run is not bit for bit "
            "what it would have been, and outputs of the modules so seen are not compared."
        )
    phases = set(operands.phases) - {operands.phase}
    if phases:
        found.append(f"Operand statistics of phase {', '.join(sorted(phases))} are in the trace but not on this page.")
    return found


def section(inputs: Inputs, operands: Operands) -> Markup:
    """Return two cards: problems and sampling, and the events."""
    events = inputs.events.sort_values("time_ns")
    rows = [
        [f"{row['step']:.0f}" if pd.notna(row["step"]) else NOTHING, row["kind"], row["detail"] or ""]
        for row in events.head(MAX_EVENTS).to_dict("records")
    ]
    return render(
        "quality.html",
        problems=problems(inputs, operands),
        sampling=_sampling(operands) if len(operands.totals) else [],
        events=rows,
        n_more=len(events) - MAX_EVENTS,
    )


def _losses(overhead: pd.DataFrame) -> list[str]:
    if overhead.empty:
        return []
    dropped, errors = (pd.to_numeric(overhead[name]).max() for name in ("n_dropped", "n_errors"))
    found: list[str] = []
    if dropped > 0:
        found.append(f"{dropped:.0f} rows were dropped because the queue was full.")
    if errors > 0:
        found.append(f"{errors:.0f} exceptions were swallowed in the training process; the events say which.")
    return found


def _non_finite(operands: Operands) -> list[str]:
    count = float(operands.totals["n_nonfinite"].sum())
    if operands.first_nonfinite is None:
        return []
    step, module, role = operands.first_nonfinite
    where = f"{module} ({role}) at step {step}"
    return [f"{count:.0f} values were NaN or infinite, first in {where}; the blocks they are in are left out."]


def _sampling(operands: Operands) -> list[tuple[str, str]]:
    totals = operands.totals
    few = int((totals["n_clusters"] < FEW_CLUSTERS).sum())
    least, middle = (percent(float(value)) for value in (totals["sampled_frac"].min(), totals["sampled_frac"].median()))
    units = f"{totals['n_clusters'].min():.0f}"
    return [
        ("probed steps", str(operands.n_probed_steps)),
        ("rows measured of those there were", f"{least} at least, {middle} in the median operand"),
        ("sampling units per step", f"{units} at least; below {FEW_CLUSTERS} in {few} of {len(totals)} operands"),
        ("rows that violate the identity", str(operands.n_identity_violations)),
        ("quantizer of the statistics", ", ".join(operands.quantizers)),
    ]
