"""Where Gaussian data lies under a scale rule, over one octave of its root mean square: the band behind each level."""

from functools import cache

from mxprobe.attribution.gaussian import gaussian_reference
from mxprobe.schema import Rule

_PHASES = 32
_NAMES = ("nmse", "zero_frac", "saturated_frac", "scale", "deadzone", "grid")


@cache
def bands(rule: str) -> dict[str, tuple[float, float]]:
    """Return least and largest value by name (`nmse`, `zero_frac`, `saturated_frac`, shares); none for an unknown rule.

    For independent Gaussian operands the relative error of a GEMM's output is that of the operand, so `nmse` is the
    band of output errors too.
    """
    if rule not in {known.value for known in Rule}:
        return {}
    octave = [gaussian_reference(phase / _PHASES, rule) for phase in range(_PHASES)]
    return {name: (min(v), max(v)) for name in _NAMES if (v := [float(getattr(each, name)) for each in octave])}
