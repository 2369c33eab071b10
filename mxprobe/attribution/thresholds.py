"""Every threshold of the verdict, with its default; each can be overridden."""

from dataclasses import dataclass, fields
from typing import Any

from mxprobe.errors import UsageError

from .devices import DEFAULT_DEVICE, DEVICES


@dataclass(frozen=True)
class Thresholds:
    """Defaults are those of the specification (science, sections 6 and 8). Errors are energies relative to the
    exact product, so 0.002 is 0.2 % of ||x W^T||^2."""

    min_steps: int = 8
    """Probed steps below which the answer is `not_enough_evidence`."""
    quantized_error: float = 1e-4
    """A module whose realised error exceeds it is taken as quantized: BF16 stays near 1e-6, MXFP8 near 1e-3."""
    mismatch: float = 0.002
    """Median |realised error in rollout - in training| over Linears that makes a symptom ..."""
    mismatch_floor_factor: float = 3.0
    """... if it is also so many times its floor, the change of realised error between probed steps."""
    mismatch_alone: float = 0.1
    """Mismatch of a single Linear that makes a symptom, whatever the others do."""
    ess_loss: float = 0.1
    """Where log-probabilities of both sides are known: part of the effective sample size lost that makes a symptom;
    so does a mean |log-probability difference| of `mismatch_floor_factor` times the floor of its dtype."""
    far_log2: float = 0.3
    """|log2(realised/predicted)| above which a module does not do what its recipe predicts."""
    unexplained: float = 0.5
    """Part of a module's error energy that its recipe leaves unexplained above which it is far, whatever its size; and
    part of all modules' mismatch that far ones must make for `not_explained`, or that replays leave at least."""
    far_share: float = 0.25
    """Share of quantized modules that must be far for `not_explained`."""
    mismatch_share: float = 0.1
    """Part of the Linears over the gate of `mismatch` with which layers explain a difference of log-probabilities."""
    mismatch_one: float = 0.02
    """Mismatch of a single Linear with which it explains such a difference, however few others differ."""
    component_share: float = 0.5
    """Share of the output error at which a component is named; below it, `mixed`."""
    where_error_frac: float = 0.2
    """A group of operands is named if its output error is at least this part of the largest group's: a correction
    costs the same in every group, and mends next to nothing in the others."""
    min_recovery: float = 0.5
    """Part of the named component that a correction must mend."""
    min_gain: float = 0.3
    """Part of the output error that a correction must remove ..."""
    min_gain_low: float = 0.05
    """... and the lower end of its 95 % interval must exceed this."""
    clean_nmse: float = 2e-3
    """A single tensor below it needs no correction; the gate used where there is no run."""
    n_resamples: int = 200
    """Bootstrap resamples of the probed steps behind the resample agreement."""
    device: str = DEFAULT_DEVICE
    """Whose GEMM rates costs are taken at, of `devices.DEVICES`."""

    def replace(self, **values: Any) -> "Thresholds":
        """Return a copy with some thresholds changed. UsageError when a name is unknown."""
        known = {field.name: field for field in fields(self)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UsageError(
                f"no threshold named {', '.join(unknown)}", remedy=f"use one of: {', '.join(sorted(known))}"
            )
        if values.get("device", DEFAULT_DEVICE) not in DEVICES:
            raise UsageError(f"no rates of device {values['device']!r}", remedy=f"use one of: {', '.join(DEVICES)}")
        merged = {name: getattr(self, name) for name in known} | values
        return Thresholds(**{name: type(getattr(self, name))(value) for name, value in merged.items()})
