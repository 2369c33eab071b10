"""GEMM rates of accelerators with FP4 units, relative to their own FP4 rate; what a correction costs follows from them.

Dense peak rates by the vendors' data sheets (sparsity taken out), which GEMMs of ordinary size do not reach:

    b200    NVIDIA Blackwell      FP4 9, FP6 and FP8 4.5, BF16 2.25 PFLOP/s
    b300    NVIDIA Blackwell Ultra    FP4 15, FP6 and FP8 5, BF16 2.5
    mi355   AMD CDNA 4            FP4 and FP6 10.1, FP8 5, BF16 2.5; no NVFP4
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    name: str
    words: str
    fp6: float
    """Rates of FP6, FP8 and BF16 GEMMs over that of FP4."""
    fp8: float
    bf16: float
    has_nvfp4: bool


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("b200", "NVIDIA B200", fp6=0.5, fp8=0.5, bf16=0.25, has_nvfp4=True),
        Device("b300", "NVIDIA B300", fp6=1 / 3, fp8=1 / 3, bf16=1 / 6, has_nvfp4=True),
        Device("mi355", "AMD MI355X", fp6=1.0, fp8=0.5, bf16=0.25, has_nvfp4=False),
    )
}
DEFAULT_DEVICE = "b200"


def extra_passes(rate: float) -> float:
    """Return the time that a GEMM takes at `rate`, of FP4's, beyond what it takes in FP4, in FP4 passes."""
    return 1.0 / rate - 1.0
