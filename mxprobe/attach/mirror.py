"""Copies of traces that other machines are writing, kept up in one directory while they grow.

What is asked for and what is answered are plain values, so that any call that reaches the other machine will do.
A live file only grows, and its new bytes are appended; any other file is replaced whole. A file that is gone there goes
here once all that is new has come: the part that a live file became is always there before the live file goes.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mxprobe.errors import TraceError
from mxprobe.trace.layout import LIVE_DIRECTORY, LOCK_FILE, RUN_FILE, lock_writer, looks_like_trace, write_json

CHUNK_BYTES = 8 << 20
_RANK = re.compile(r"rank=(\d+)")
_GROWING = ".arrows"

Known = dict[str, tuple[int, int]]
"""Path in the trace -> (stamp of the file, bytes of it that have come)."""


class Piece(NamedTuple):
    """Some bytes of a file."""

    path: str
    stamp: int
    offset: int
    data: bytes
    size: int
    """Of the whole file."""


class News(NamedTuple):
    """What is new in a trace, `CHUNK_BYTES` at most; ask again where it is not all."""

    pieces: list[Piece]
    present: list[str]
    is_all: bool


def news_of(directory: Path, known: Mapping[str, tuple[int, int]]) -> News:
    """On the machine where the trace is written."""
    pieces: list[Piece] = []
    present: list[str] = []
    left, is_all = CHUNK_BYTES, True
    for path, file in files_of(directory):
        try:
            with open(file, "rb") as opened:
                stat = os.fstat(opened.fileno())  # of what is read, though another file may take its name meanwhile
                stamp = stat.st_ino if path.endswith(_GROWING) else stat.st_mtime_ns
                before, got = known.get(path, (stamp, 0))
                offset = got if before == stamp and got <= stat.st_size else 0
                is_known = path in known and before == stamp and offset == stat.st_size
                opened.seek(offset)
                data = b"" if is_known else opened.read(min(left, stat.st_size - offset))
        except FileNotFoundError:
            is_all = False  # what it has become is not among the files
            continue
        present.append(path)
        if is_known:
            continue
        if not left:
            is_all = False
            continue
        left -= len(data)
        is_all &= offset + len(data) == stat.st_size
        pieces.append(Piece(path, stamp, offset, data, stat.st_size))
    return News(pieces, present, is_all)


def files_of(directory: Path) -> Iterator[tuple[str, Path]]:
    """Parts before live files, but listed after them: of a live file that becomes a part one of the two is seen."""
    found = [*files_below(directory / LIVE_DIRECTORY), *files_below(directory)]
    named = {file.relative_to(directory).as_posix(): file for file in found}
    yield from sorted(named.items(), key=lambda item: (item[0].startswith(LIVE_DIRECTORY), item[0]))


def files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):  # unlike `rglob`, no error where a directory goes meanwhile
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())


@dataclass
class _Node:
    known: Known = field(default_factory=dict[str, tuple[int, int]])
    ranks: dict[int, int] = field(default_factory=dict[int, int])
    """Rank in its own trace -> rank here."""
    run: dict[str, Any] = field(default_factory=dict[str, Any])


class Gathering:
    """The one trace that holds those of several nodes. Not for several threads.

    A rank keeps its number unless another node has it. TraceError if the directory holds a trace or cannot be written.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        self.directory = directory
        self._facts = dict(facts)
        self._nodes: dict[str, _Node] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = None if looks_like_trace(directory) else lock_writer(directory)
        except OSError as error:
            raise TraceError(
                f"cannot write a trace to {directory}: {error}", remedy="name another one with -o"
            ) from None
        if lock is None:
            raise TraceError(
                f"{directory} already holds a trace", remedy="name another one with -o, or remove that one"
            )
        self._lock = lock

    def known(self, node: str) -> Known:
        return dict(self._node(node).known)

    @property
    def n_ranks(self) -> int:
        return sum(len(each.run.get("ranks", ())) for each in self._nodes.values())

    def take(self, node: str, news: News) -> None:
        """Write what a node has told. OSError if the disk takes no more; ValueError, TraceError: it told nonsense."""
        here = self._node(node)
        for piece in news.pieces:
            self._write(node, here, piece)
        if news.is_all:
            for path in set(here.known) - set(news.present):
                del here.known[path]
                (self.directory / self._place(here, path)).unlink(missing_ok=True)

    def close(self) -> None:
        """`run.json` says what has come; nobody writes here any more."""
        if any(each.run for each in self._nodes.values()):
            self._write_run()
        os.close(self._lock)

    def _node(self, name: str) -> _Node:
        return self._nodes.setdefault(name, _Node())

    def _write(self, node: str, here: _Node, piece: Piece) -> None:
        target = self.directory / self._place(here, piece.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        grows = piece.path.endswith(_GROWING)
        file = target if grows else target.with_name(f".{node[:8]}.{target.name}.tmp")
        with open(file, "r+b" if piece.offset else "wb") as opened:
            opened.seek(piece.offset)
            opened.write(piece.data)
        got = piece.offset + len(piece.data)
        here.known[piece.path] = (piece.stamp, got)
        if grows or got < piece.size:
            return
        if piece.path == RUN_FILE:
            here.run = json_of(file)
            file.unlink()
            self._write_run()
        else:
            os.replace(file, target)

    def _place(self, here: _Node, path: str) -> str:
        """Where a node's file goes; its name may not lead out of the directory."""
        if path.startswith("/") or ".." in Path(path).parts or Path(path).name == LOCK_FILE:
            raise TraceError(f"a node named a file {path!r}, which is none of a trace")
        return _RANK.sub(lambda found: f"rank={self._rank(here, int(found[1]))}", path)

    def _rank(self, here: _Node, rank: int) -> int:
        if rank not in here.ranks:
            taken = {number for each in self._nodes.values() for number in each.ranks.values()}
            here.ranks[rank] = rank if rank not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
        return here.ranks[rank]

    def _write_run(self) -> None:
        ranks: list[dict[str, Any]] = []
        refused: list[dict[str, Any]] = []
        told = {name: each for name, each in self._nodes.items() if each.run}
        for name, here in told.items():
            of_node = [
                {**rank, "rank": self._rank(here, rank["rank"]), "node": name} for rank in here.run.get("ranks", ())
            ]
            ranks += of_node
            refused += [{**each, "node": name} for each in here.run.get("refused", ())]
        first = min(
            told.values(),
            key=lambda here: min((self._rank(here, r["rank"]) for r in here.run.get("ranks", ())), default=1 << 30),
        )
        closed = [int(here.run.get("closed_ns") or 0) for here in told.values()]
        run = {**first.run, **self._facts, "ranks": sorted(ranks, key=lambda rank: rank["rank"])}
        run["closed_ns"] = max(closed) if all(closed) else None
        run |= {"refused": refused} if refused else {}
        if len(told) > 1:
            run |= _of_several({name: here.run for name, here in told.items()})
            run.pop("thinned", None)  # each node has cut its own steps
        write_json(self.directory / RUN_FILE, run)


def _of_several(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the retention of each node did, for all of them."""
    windows = {name: run["thinned"] for name, run in runs.items() if run.get("thinned")}
    excess = sum(int(run.get("excess_bytes") or 0) for run in runs.values())
    failed = [f"node {name}: {run['compaction_error']}" for name, run in runs.items() if run.get("compaction_error")]
    facts = {"thinned_by_node": windows, "excess_bytes": excess, "compaction_error": "; ".join(failed)}
    return {name: fact for name, fact in facts.items() if fact}


def json_of(file: Path) -> dict[str, Any]:
    """ValueError if it is no JSON object."""
    import json

    found: Any = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return found
