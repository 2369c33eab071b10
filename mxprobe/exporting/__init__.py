"""Take a trace elsewhere: whole tables as files, curves into an experiment tracker."""

from .files import FileFormat, export_files
from .follow import follow_to
from .series import curves
from .trackers import Tracker, export_to

__all__ = ["FileFormat", "Tracker", "curves", "export_files", "export_to", "follow_to"]
