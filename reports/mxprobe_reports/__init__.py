"""Traces as pages: `mxprobe report`. Never imports torch, so that a report can be made on a laptop."""

from .inputs import Inputs
from .report import Report, build_report, write_report

__all__ = ["Inputs", "Report", "build_report", "write_report"]
