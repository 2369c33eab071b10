"""Traces as pages: `mxprobe report`. Never imports torch, so that a report can be made on a laptop."""

from .inputs import Inputs
from .report import Report, build_report, write_report
from .rows import Rows

__all__ = ["Inputs", "Report", "Rows", "build_report", "write_report"]
