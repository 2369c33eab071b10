"""Watch a trace that another process is writing: read what is new, keep what is shown, draw it in a terminal."""

from .session import watch
from .source import find_trace

__all__ = ["find_trace", "watch"]
