"""Watch a trace that another process is writing: read what is new, keep what is shown, draw it in a terminal."""

from .target import find_trace
from .watching import watch

__all__ = ["find_trace", "watch"]
