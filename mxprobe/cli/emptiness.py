"""A trace in which nothing was measured has no answer: the commands that judge say so and end in exit code 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxprobe.errors import TraceError

if TYPE_CHECKING:
    from mxprobe.trace import Trace

MEASUREMENTS = ("tensors", "outputs", "rollouts", "sensitivity")
"""Tables of which one row at least is needed to say anything."""


def require_measurements(trace: Trace) -> None:
    """TraceError when the trace holds no measurement; to be called after what there is was shown."""
    if any(len(trace.table(name, ("step",))) for name in MEASUREMENTS):
        return
    raise TraceError(
        f"nothing was measured in {trace.directory}, so there is nothing to judge",
        cause="the probe was taken off before its first probed step, or the module names given matched nothing",
        remedy="attach again for longer, or with a smaller --every; `mxprobe status` counts the probed steps",
    )
