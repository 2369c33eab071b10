"""Hold a trace against limits: what was measured, against which bound, and who is over it."""

from .junit import to_junit
from .limits import CheckResult, Finding, Status, check_trace

__all__ = ["CheckResult", "Finding", "Status", "check_trace", "to_junit"]
