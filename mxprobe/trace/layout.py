"""Where things lie in a trace directory, and how its files are replaced without ever being half there."""

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mxprobe.schema import TABLES

RUN_FILE = "run.json"
LIVE_DIRECTORY = "live"
LOCK_FILE = ".writer.lock"
SCHEMA_MINOR = 0
"""Counts additions that an older reader can ignore; `schema.SCHEMA_VERSION` counts changes it cannot."""


class LiveFile(NamedTuple):
    """A stream of record batches, which becomes the Parquet part of the same table, rank and number, whole."""

    table: str
    rank: int
    number: int
    path: Path


def live_path(directory: Path, table: str, rank: int, number: int = 0) -> Path:
    return directory / LIVE_DIRECTORY / f"rank={rank}" / f"{table}-{number:05d}.arrows"


def part_path(directory: Path, table: str, rank: int, number: int) -> Path:
    return directory / table / f"rank={rank}" / f"part-{number:05d}.parquet"


def live_files(directory: Path) -> list[LiveFile]:
    """Each live file, in the order of the schema, then by rank and number.

    One whose part is there too is a leftover: its writer stopped, or was stopped, before it could remove it.
    """
    order = list(TABLES)
    found: list[LiveFile] = []
    for path in (directory / LIVE_DIRECTORY).glob("rank=*/*.arrows"):
        table, _, digits = path.stem.partition("-")
        rank = rank_of(path.parent)
        if table in TABLES and digits.isdecimal() and rank is not None:
            found.append(LiveFile(table, rank, int(digits), path))
    return sorted(found, key=lambda file: (order.index(file.table), file.rank, file.number))


def fresh_live_files(directory: Path, table: str) -> tuple[list[LiveFile], list[tuple[int, Path]]]:
    """The live files of a table that no part holds yet, and its parts: together each row once.

    In this order because a live file may become a part meanwhile, and never the other way round.
    """
    live = [file for file in live_files(directory) if file.table == table]
    parts = part_files(directory, table)
    held = {path for _, path in parts}
    return [file for file in live if part_of(directory, file) not in held], parts


def part_of(directory: Path, file: LiveFile) -> Path:
    """The part that a live file becomes."""
    return part_path(directory, file.table, file.rank, file.number)


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
