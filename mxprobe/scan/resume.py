"""A scan that was stopped goes on where it was.

A weight with a `modules` row is done; a batch of calibration inputs is done when the event that counts it is there. The
rows of what is done are copied into a new trace in the same place, since a trace has one writer in its life.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from mxprobe.errors import UsageError
from mxprobe.tables import TABLES
from mxprobe.trace import Trace, TraceWriter, open_trace

from .calibration import calibration_files
from .checkpoint import Checkpoint

_WEIGHT_TABLES = ("tensors", "whatif", "modules")
_BATCH_TABLES = ("tensors", "whatif", "outputs", "sensitivity", "replays", "events")
CALIBRATED = "calibrated"
"""Event that ends a batch of calibration inputs: all its rows are written."""


def identity_of(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for a scan to be continued: files and settings, as JSON gives them back."""
    identity: dict[str, Any] = {
        "checkpoint": str(checkpoint.path.resolve()),
        "files": checkpoint.fingerprint,
        **settings,
    }
    if settings["calibration"]:
        stats = [(file, file.stat()) for file in calibration_files(Path(settings["calibration"]))]
        identity["calibration_files"] = [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats]
    return json.loads(json.dumps(identity))


def _backup(output: Path) -> Path:
    return output.with_name(f"{output.name}.resuming")


def interrupted(output: Path, identity: dict[str, Any]) -> Trace | None:
    """Return the unfinished scan to continue, moved out of the way; None when there is none.

    A scan killed while it took over an earlier one leaves the earlier one in the backup, which then counts.
    """
    backup = _backup(output)
    source = backup if backup.is_dir() else output
    if not source.is_dir() or not any(source.iterdir()):
        return None
    trace = open_trace(source)
    recorded = trace.run.get("scan")
    if trace.is_complete or trace.is_live or not isinstance(recorded, dict):
        return None  # the writer says in words that the place is taken
    differing = [key for key in identity if recorded.get(key) != identity[key]]
    if differing:
        raise UsageError(
            f"{output} holds an unfinished scan of something else ({', '.join(differing)} differ)",
            cause="the checkpoint has changed, or other options were given",
            remedy="repeat the options of that scan, choose another directory with -o, or remove that one",
        )
    if source is output:
        output.rename(backup)
    elif output.is_dir():
        shutil.rmtree(output)
    return open_trace(backup)


def take_over(earlier: Trace, writer: TraceWriter, output: Path) -> tuple[set[str], set[int]]:
    """Copy the rows of what is done; returns the modules of done weights and the steps of done batches."""
    done = set(earlier.modules()["module"].astype(str))
    events = earlier.events()
    steps = {int(step) for step in events.loc[events["kind"].astype(str) == CALIBRATED, "step"]}
    for table in dict.fromkeys((*_WEIGHT_TABLES, *_BATCH_TABLES)):
        frame = earlier.table(table)
        kept = pd.Series(data=False, index=frame.index)
        if table in _WEIGHT_TABLES:
            is_weight = frame["step"] == 0 if "step" in frame else True
            kept |= frame["module"].astype(str).isin(sorted(done)) & is_weight
        if table in _BATCH_TABLES:
            kept |= frame["step"].isin(sorted(steps))
        rows = earlier.arrow(table).filter(pa.array(kept))
        if rows.num_rows:
            writer.append(table, {name: rows.column(name).to_pylist() for name, _ in TABLES[table]})
    shutil.rmtree(_backup(output))
    return done, steps
