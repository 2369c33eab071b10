"""The trace on disk: write it durably, read it back whatever happened to the writer, compact it to Parquet."""

from .compaction import compact
from .reader import Trace, open_trace
from .retention import Retention
from .writer import TraceWriter

__all__ = ["Retention", "Trace", "TraceWriter", "compact", "open_trace"]
