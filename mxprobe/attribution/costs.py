"""What a correction costs. Estimates from operation counts, not measurements on the user's device.

`cost_gemm` is extra time in FP4 passes of the GEMM whose operand is corrected, by the rates of a device (`devices`): a
second pass on the residual is one more, MXFP8 in place of MXFP4 one more on a B200 and two more on a B300. Scaling and
rotating touch each element once, which is small beside a GEMM and not zero. `bits_per_element`: elements and scales.
"""

from dataclasses import dataclass

from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from .devices import DEFAULT_DEVICE, DEVICES, extra_passes

MXFP4_BITS = 4.25


@dataclass(frozen=True)
class Cost:
    cost_gemm: float
    bits_per_element: float
    note: str


def cost_of(correction: str, device: str = DEFAULT_DEVICE) -> Cost:
    """Return the cost of a correction, such as `of:0.5`, on a device of `DEVICES`. ValueError when it is none."""
    on = DEVICES[device]
    parsed = Correction.parse(correction)
    kind, parameter = parsed.kind, parsed.parameter
    if kind is CorrectionKind.RULE:
        return Cost(0.0, MXFP4_BITS, "free: another exponent")
    if kind is CorrectionKind.MACRO_BLOCK_SCALING and isinstance(parameter, (int, float)):
        return Cost(0.02, MXFP4_BITS + 8.0 / parameter, "one multiplication per element, 8 bits per macro block")
    if kind is CorrectionKind.HADAMARD:
        return Cost(0.1, MXFP4_BITS, "a rotation of this operand and of the one it meets")
    if kind is CorrectionKind.OUTLIER_FALLBACK:
        return Cost(1.0, 2.0 * MXFP4_BITS, "a second GEMM on the residual")
    if kind is CorrectionKind.CHANNEL_RESIDUAL and isinstance(parameter, (int, float)):
        share = parameter / 100.0
        return Cost(
            share, MXFP4_BITS * (1.0 + share), "a second GEMM on these channels, gathered; no engine has it yet"
        )
    if kind is CorrectionKind.STOCHASTIC:
        return Cost(0.02, MXFP4_BITS, "a random number for each element")
    nvfp4 = "its own FP4 units" if on.has_nvfp4 else f"emulation: {on.words} has no NVFP4"
    if kind is CorrectionKind.NVFP4:
        return Cost(0.0, 4.5, f"another format: {nvfp4}")
    if kind is CorrectionKind.NVFP4_4OVER6:
        return Cost(0.02, 4.5, f"NVFP4 ({nvfp4}); every block is quantized twice and the better one kept")
    if kind is CorrectionKind.MXFP4_4OVER6:
        return Cost(0.02, MXFP4_BITS, "every block is quantized twice and the better one kept")
    if kind is CorrectionKind.HIF4:
        return Cost(0.0, 4.5, "another format: needs HiF4 hardware (Ascend) or emulation")
    if kind in (CorrectionKind.MXFP6_E2M3, CorrectionKind.MXFP6_E3M2):
        return Cost(extra_passes(on.fp6), 6.25, f"{on.fp6:.2g} of the FP4 rate on {on.words}")
    if kind is CorrectionKind.MXFP8:
        return Cost(extra_passes(on.fp8), 8.25, f"{on.fp8:.2g} of the FP4 rate on {on.words}")
    return Cost(extra_passes(on.bf16), 16.0, f"{on.bf16:.2g} of the FP4 rate on {on.words}")


def tier_of(correction: str) -> int:
    """Return 1 for corrections that keep MXFP4 elements and power-of-two block scales, 2 for those that leave them."""
    return 1 if Correction.parse(correction).keeps_format else 2
