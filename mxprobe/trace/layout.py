"""Where things lie in a trace directory, and how its files are replaced without ever being half there."""

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mxprobe.schema import TABLES

RUN_FILE = "run.json"
LIVE_DIRECTORY = "live"
LOCK_FILE = ".writer.lock"
SCHEMA_MINOR = 0
"""Counts additions that an older reader can ignore; `schema.SCHEMA_VERSION` counts changes it cannot."""


def live_path(directory: Path, table: str, rank: int) -> Path:
    return directory / LIVE_DIRECTORY / f"rank={rank}" / f"{table}.arrows"


def part_path(directory: Path, table: str, rank: int, number: int) -> Path:
    return directory / table / f"rank={rank}" / f"part-{number:05d}.parquet"


def live_files(directory: Path) -> list[tuple[str, int, Path]]:
    """(table, rank, path) of each live file, in the order of the schema, then by rank."""
    found = [
        (path.stem, rank, path)
        for path in (directory / LIVE_DIRECTORY).glob("rank=*/*.arrows")
        if path.stem in TABLES and (rank := rank_of(path.parent)) is not None
    ]
    order = list(TABLES)
    return sorted(found, key=lambda item: (order.index(item[0]), item[1]))


def cut_files(directory: Path) -> list[Path]:
    """What compaction could not read and kept, by rank and table."""
    return sorted((directory / LIVE_DIRECTORY).glob("rank=*/*.cut"))


def part_files(directory: Path, table: str) -> list[tuple[int, Path]]:
    """(rank, path) of each finished Parquet part of a table, by rank and number."""
    found = [
        (rank, path)
        for path in (directory / table).glob("rank=*/part-*.parquet")
        if (rank := rank_of(path.parent)) is not None
    ]
    return sorted(found, key=lambda item: (item[0], item[1].name))


def rank_of(directory: Path) -> int | None:
    """The rank in a `rank=R` directory name; None when it is not one."""
    _, _, digits = directory.name.partition("=")
    return int(digits) if digits.isdecimal() else None


def looks_like_trace(directory: Path) -> bool:
    """Whether a writer has been here: a run file, live files or table directories."""
    if (directory / RUN_FILE).exists() or (directory / LIVE_DIRECTORY).exists():
        return True
    return any(part_files(directory, table) for table in TABLES)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file at once: readers see the old one or the new one, after a power cut too.

    Raises:
        OSError: not written; the old file is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with removed_on_error(temporary):
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, default=str)  # ASCII: command lines may hold lone surrogates
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def removed_on_error(temporary: Path) -> Generator[None, None, None]:
    """A file that could not be finished goes: on a full disk it would hold what the rest needs."""
    try:
        yield
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def lock_writer(directory: Path) -> int | None:
    """Take the writer's lock; a descriptor to keep open, or None when a live writer holds it.

    The kernel drops the lock with the process, so a killed writer never leaves it behind.
    """
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def has_live_writer(directory: Path) -> bool:
    """Whether a process is writing this trace right now."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
