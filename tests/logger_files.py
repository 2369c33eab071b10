"""What loggers wrote to disk, read without mxprobe: (step, key) -> values in the order of writing."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

Written = dict[tuple[int, str], list[float]]

_BLOCK = 32768
_HEADER = 7


def wandb_history(directory: Path) -> Iterator[dict[str, float]]:
    """The rows of an offline run's history, numbers only.

    The `.wandb` file is a LevelDB log: a 7-byte file header, then blocks of records (checksum, length, type), a
    record that does not fit being split into first, middle and last.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("offline-run-*/*.wandb")
    data, at, message = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        message += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # full, last
            record = Record.FromString(message)
            message = b""
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if items:
                yield {key: value for key, value in items.items() if isinstance(value, (int, float))}


def tensorboard_scalars(directory: Path) -> Written:
    """Values are float32, as `add_scalar` stores them by default."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written: Written = {}
    for path in directory.rglob("events.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                written.setdefault((event.step, tag), []).append(event.value)
    return written


def trackio_logs(directory: Path) -> Written:
    """From trackio's own SQLite file, by the step logged beside the metrics: trackio's own counts its calls."""
    import sqlite3

    written: Written = {}
    for path in directory.glob("*.db"):
        with sqlite3.connect(path) as database:
            for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id"):
                metrics = json.loads(text)
                for key, value in metrics.items():
                    if isinstance(value, (int, float)):
                        written.setdefault((int(metrics.get("train/global_step", -1)), key), []).append(value)
    return written
