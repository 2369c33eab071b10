"""Where things lie in a trace directory, and how its files are replaced without ever being half there."""

import fcntl
import json
import os
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mxprobe.schema import TABLES

RUN_FILE = "run.json"
LIVE_DIRECTORY = "live"
LOCK_FILE = ".writer.lock"

_PART = re.compile(r"part-(\d+)(?:-(\d+))?\.parquet")


class Part(NamedTuple):
    """A Parquet file that holds the live files `first` to `last` of a table and rank, whole or added up."""

    rank: int
    first: int
    last: int
    path: Path


class LiveFile(NamedTuple):
    """A stream of record batches, which becomes the Parquet part of the same table, rank and number, whole."""

    table: str
    rank: int
    number: int
    path: Path


def live_path(directory: Path, table: str, rank: int, number: int = 0) -> Path:
    return directory / LIVE_DIRECTORY / f"rank={rank}" / f"{table}-{number:05d}.arrows"


def part_path(directory: Path, table: str, rank: int, first: int, last: int | None = None) -> Path:
    numbers = f"{first:05d}" if last is None or last == first else f"{first:05d}-{last:05d}"
    return directory / table / f"rank={rank}" / f"part-{numbers}.parquet"


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


def fresh_live_files(directory: Path, table: str) -> tuple[list[LiveFile], list[Part]]:
    """The live files of a table that no part holds yet, and its parts: together each row once.

    In this order because a live file may become a part meanwhile, and never the other way round.
    """
    live = [file for file in live_files(directory) if file.table == table]
    parts = part_files(directory, table)
    return [file for file in live if not is_held(file, parts)], parts


def is_held(file: LiveFile, parts: Sequence[Part]) -> bool:
    """Whether one of the parts holds that live file."""
    return any(part.rank == file.rank and part.first <= file.number <= part.last for part in parts)


def has_gap(live: Sequence[LiveFile], parts: Sequence[Part]) -> bool:
    """Whether a number is missing between the files of a rank: removed, or listed while parts were put together."""
    numbers: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        numbers.setdefault(part.rank, []).append((part.first, part.last))
    for file in live:
        numbers.setdefault(file.rank, []).append((file.number, file.number))
    for held in numbers.values():
        held.sort()
        if held[0][0] > 0 or any(after[0] != before[1] + 1 for before, after in pairwise(held)):
            return True
    return False


def cut_files(directory: Path) -> list[Path]:
    """What compaction could not read and kept, by rank and table."""
    return sorted((directory / LIVE_DIRECTORY).glob("rank=*/*.cut"))


def part_files(directory: Path, table: str, rank: int | None = None) -> list[Part]:
    """The finished Parquet parts of a table, by rank and number, without those that another one holds as well."""
    return _split_parts(directory, table, rank)[0]


def is_covered(relative: str, held: Iterable[str]) -> bool:
    """Whether one of the parts `held`, other than itself, holds what a part does; paths in a trace directory."""
    span = _span(relative)
    others = (each for each in map(_span, (path for path in held if path != relative)) if each is not None)
    return span is not None and any(
        folder == span[0] and first <= span[1] and span[2] <= last for folder, first, last in others
    )


def _span(relative: str) -> tuple[str, int, int] | None:
    """(folder, first, last) of a path that is a part's."""
    folder, _, name = relative.rpartition("/")
    match = _PART.fullmatch(name)
    if match is None or folder.partition("/")[0] not in TABLES:
        return None
    return folder, int(match[1]), int(match[2] or match[1])


def covered_parts(directory: Path, table: str) -> list[Part]:
    """Parts that a longer one holds as well: what a writer that was stopped in between has left."""
    return _split_parts(directory, table)[1]


def _split_parts(directory: Path, table: str, of_rank: int | None = None) -> tuple[list[Part], list[Part]]:
    found: list[Part] = []
    ranks = "*" if of_rank is None else str(of_rank)
    for path in (directory / table).glob(f"rank={ranks}/part-*.parquet"):
        rank, match = rank_of(path.parent), _PART.fullmatch(path.name)
        if rank is not None and match is not None:
            first = int(match[1])
            found.append(Part(rank, first, int(match[2] or first), path))
    found.sort(key=lambda part: (part.rank, part.first, -part.last))
    kept: list[Part] = []
    covered: list[Part] = []
    for part in found:  # a part that begins later and ends no later than the one before lies within it
        within = kept and kept[-1].rank == part.rank and part.last <= kept[-1].last
        (covered if within else kept).append(part)
    return kept, covered


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
        with open(fresh(temporary), "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, default=str)  # ASCII: command lines may hold lone surrogates
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def fresh(temporary: Path) -> int:
    """A descriptor of a new file of that name, in place of a leftover; never one that a link there points to."""
    temporary.unlink(missing_ok=True)
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


@contextmanager
def removed_on_error(temporary: Path) -> Generator[None, None, None]:
    """A file that could not be finished goes: on a full disk it would hold what the rest needs."""
    try:
        yield
    except Exception:
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
