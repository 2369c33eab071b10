"""What a correction costs. Estimates from operation counts, not measurements on the user's device.

`cost_gemm` is extra time in passes of the GEMM whose operand is corrected, on hardware whose FP4 runs at twice
the rate of FP8 and four times that of BF16: a second pass on the residual is one more GEMM, MXFP8 in place of
MXFP4 is one more, BF16 three more. Scaling and rotating touch each element once, which is small beside a GEMM
and not zero. `bits_per_element` counts elements and scales.
"""

from dataclasses import dataclass

from mxprobe_kernels.formats import Correction, CorrectionKind

MXFP4_BITS = 4.25


@dataclass(frozen=True)
class Cost:
    cost_gemm: float
    bits_per_element: float
    note: str


def cost_of(correction: str) -> Cost:
    """Cost of a correction by its spelling, e.g. `of:0.5`. ValueError when it is none."""
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
    if kind is CorrectionKind.NVFP4:
        return Cost(0.0, 4.5, "another format: needs NVFP4 hardware or emulation")
    if kind is CorrectionKind.NVFP4_4OVER6:
        return Cost(0.02, 4.5, "NVFP4 hardware; every block is quantized twice and the better one kept")
    if kind is CorrectionKind.MXFP4_4OVER6:
        return Cost(0.02, MXFP4_BITS, "every block is quantized twice and the better one kept")
    if kind is CorrectionKind.HIF4:
        return Cost(0.0, 4.5, "another format: needs HiF4 hardware (Ascend) or emulation")
    if kind in (CorrectionKind.MXFP6_E2M3, CorrectionKind.MXFP6_E3M2):
        return Cost(1.0, 6.25, "the rate of MXFP8; on MI355 that of MXFP4")
    if kind is CorrectionKind.MXFP8:
        return Cost(1.0, 8.25, "half of the FP4 rate")
    return Cost(3.0, 16.0, "a quarter of the FP4 rate")


def tier_of(correction: str) -> int:
    """1 for corrections that keep MXFP4 elements and power-of-two block scales, 2 for those that leave them."""
    return 1 if Correction.parse(correction).keeps_format else 2
