"""The settings of a scan, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from mxprobe.emulation.recipe import DEFAULT_EXCLUDE
from mxprobe.errors import UsageError
from mxprobe_kernels.formats import get_format, get_rule
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS, Correction


@dataclass(frozen=True)
class ScanSettings:
    """Says what a scan measures. Raises UsageError for names that do not exist."""

    format: str = "mxfp4"
    rule: str = "rceil"
    whatifs: tuple[str, ...] = DEFAULT_WHATIFS
    whatif_elements: int = 65_536
    """Elements of each weight and direction on which what-ifs are measured."""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    calibration: str = ""
    """Path of real inputs for the model, see `mxprobe.scan.calibration`; empty: weights only."""
    calibration_batches: int = 8
    """Batches of at most four sequences; the verdict wants eight."""

    def __post_init__(self) -> None:
        try:
            get_format(self.format)
            get_rule(self.rule)
            for name in self.whatifs:
                Correction.parse(name)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.whatif_elements < 1:
            raise UsageError("what-ifs need at least one element per weight; leave them out with no what-ifs at all")
        if self.calibration_batches < 1:
            raise UsageError("a calibration has at least one batch")
