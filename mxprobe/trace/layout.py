"""Names the files of a trace directory, and replaces them without ever leaving one half written."""

import fcntl
import json
import os
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mxprobe.tables import TABLES

RUN_FILE = "run.json"
LIVE_DIRECTORY = "live"
LOCK_FILE = ".writer.lock"

_PART = re.compile(r"part-(\d+)(?:-(\d+))?\.parquet")


class LiveFile(NamedTuple):
    """A stream of record batches, which becomes the Parquet part of the same table, rank and number, whole."""

    table: str
    rank: int
    number: int
    path: Path


class PartFile(NamedTuple):
    """A Parquet file that holds the live files `first` to `last` of a table and rank, whole or added up."""

    rank: int
    first: int
    last: int
    path: Path

    @classmethod
    def at(cls, path: Path) -> "PartFile | None":
        """Return the part that lies at `path`; None where no part is named so."""
        rank, match = rank_of(path.parent), _PART.fullmatch(path.name)
        return None if rank is None or match is None else cls(rank, int(match[1]), int(match[2] or match[1]), path)

    def holds(self, other: "PartFile | LiveFile") -> bool:
        """Return whether all rows of a part or live file of the same table are in this part."""
        first, last = (other.first, other.last) if isinstance(other, PartFile) else (other.number, other.number)
        return self.rank == other.rank and self.first <= first and last <= self.last


def live_path(directory: Path, table: str, rank: int, number: int = 0) -> Path:
    return directory / LIVE_DIRECTORY / f"rank={rank}" / f"{table}-{number:05d}.arrows"


def part_path(directory: Path, table: str, rank: int, first: int, last: int | None = None) -> Path:
    numbers = f"{first:05d}" if last in (first, None) else f"{first:05d}-{last:05d}"
    return directory / table / f"rank={rank}" / f"part-{numbers}.parquet"


def live_files(directory: Path) -> list[LiveFile]:
    """List the live files in the order of the schema, then by rank and number.

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


def fresh_live_files(directory: Path, table: str) -> tuple[list[LiveFile], list[PartFile]]:
    """List the live files of a table that no part holds yet, and its parts: together each row once.

    In this order because a live file may become a part meanwhile, and never the other way round.
    """
    live = [file for file in live_files(directory) if file.table == table]
    parts = part_files(directory, table)
    return [file for file in live if not is_held(file, parts)], parts


def is_held(file: LiveFile, parts: Sequence[PartFile]) -> bool:
    """Return whether one of the parts holds that live file."""
    return any(part.holds(file) for part in parts)


def has_gap(live: Sequence[LiveFile], parts: Sequence[PartFile]) -> bool:
    """Return whether a file of a rank is missing between others: removed, or listed while parts were put together."""
    held = [(part.rank, part.first, part.last) for part in parts]
    held += [(file.rank, file.number, file.number) for file in live]
    next_numbers: dict[int, int] = {}
    for rank, first, last in sorted(held):
        if first != next_numbers.get(rank, 0):
            return True
        next_numbers[rank] = last + 1
    return False


def cut_files(directory: Path) -> list[Path]:
    """List what compaction could not read and kept, by rank and table."""
    return sorted((directory / LIVE_DIRECTORY).glob("rank=*/*.cut"))


def part_files(directory: Path, table: str) -> list[PartFile]:
    """List the finished Parquet parts of a table, by rank and number, without those that another one holds as well."""
    return _split_parts(directory, table)[0]


def covered_parts(directory: Path, table: str) -> list[PartFile]:
    """List the parts that a longer one holds as well: what a writer that was stopped in between has left."""
    return _split_parts(directory, table)[1]


def _split_parts(directory: Path, table: str) -> tuple[list[PartFile], list[PartFile]]:
    paths = (directory / table).glob("rank=*/part-*.parquet")
    found = sorted(filter(None, map(PartFile.at, paths)), key=lambda part: (part.rank, part.first, -part.last))
    kept: list[PartFile] = []
    covered: list[PartFile] = []
    for part in found:
        (covered if kept and kept[-1].holds(part) else kept).append(part)
    return kept, covered


def is_covered(relative: str, held: Iterable[str]) -> bool:
    """Return whether one of the parts `held`, other than itself, holds what a part does; paths in a trace directory."""
    part = PartFile.at(Path(relative))
    others = (PartFile.at(Path(path)) for path in held if path != relative)
    return part is not None and any(
        other is not None and other.path.parent == part.path.parent and other.holds(part) for other in others
    )


def rank_of(directory: Path) -> int | None:
    """Return the rank in a `rank=R` directory name; None when it is not one."""
    _, _, digits = directory.name.partition("=")
    return int(digits) if digits.isdecimal() else None


def looks_like_trace(directory: Path) -> bool:
    """Return whether a writer has been here: a run file, live files or table directories."""
    if (directory / RUN_FILE).exists() or (directory / LIVE_DIRECTORY).exists():
        return True
    return any(part_files(directory, table) for table in TABLES)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file at once: readers see the old one or the new one, after a power cut too.

    Raises:
        OSError: not written; the old file is as it was.
    """
    with replacing(path) as file:
        file.write(
            f"{json.dumps(data, indent=1, default=str)}\n".encode()
        )  # ASCII: command lines may hold lone surrogates


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Open a new file that takes its name when it is whole and on the disk; on an error nothing is left of it.

    A leftover of an earlier writer goes first, and a link in its place is never followed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o644), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception:  # on a full disk it would hold what the rest needs
        temporary.unlink(missing_ok=True)
        raise


def lock_writer(directory: Path) -> int | None:
    """Take the writer's lock; a descriptor to keep open, or None when a live writer holds it.

    The kernel drops the lock with the process, so a killed writer never leaves it behind.
    """
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def has_live_writer(directory: Path) -> bool:
    """Return whether a process is writing this trace right now."""
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
