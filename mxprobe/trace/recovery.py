"""A trace whose writer died, finished by another process."""

import os
from pathlib import Path

from mxprobe.errors import TraceError

from . import layout
from .compaction import compact_live
from .retention import Retention, RetentionEnforcer
from .run_file import read_run
from .thinning import Windows


def compact(directory: Path | str) -> None:
    """Finish a trace whose writer died: live files become Parquet, `run.json` says so.

    Raises:
        TraceError: not a trace, or its writer is still alive.
    """
    directory = Path(directory)
    run, problems = read_run(directory)
    lock = layout.lock_writer(directory)
    if lock is None:
        raise TraceError(
            f"{directory} is still being written",
            cause=f"process {run.get('writer_pid', 'unknown')} holds it",
            remedy="detach first, or read it as it is: readers see every acknowledged row",
        )
    try:
        compact_live(directory)
        windows = Windows.from_json(run.get("thinned"))
        if windows is not None:
            RetentionEnforcer(directory, Retention(), lambda _: None).apply(windows)
        if run.get("closed_ns") is None and not problems:
            layout.write_json(directory / layout.RUN_FILE, {**run, "compacted_after_death": True})
    finally:
        os.close(lock)
