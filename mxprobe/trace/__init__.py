"""The trace on disk: write it durably, read it back whatever happened to the writer, compact it to Parquet."""

from .reader import Trace, open_trace
from .recovery import compact
from .retention import Retention
from .writer import TraceWriter

__all__ = ["Retention", "Trace", "TraceWriter", "compact", "open_trace"]
