"""Traces as pages: `mxprobe report`. Never imports torch, so that a report can be made on a laptop."""

from .comparison_page import ComparisonPage, write_comparison
from .inputs import Inputs
from .notebook import figures
from .report import Report, write_report
from .rows import Rows

__all__ = ["ComparisonPage", "Inputs", "Report", "Rows", "figures", "write_comparison", "write_report"]
