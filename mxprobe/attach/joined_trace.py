"""The traces that other machines are writing, copied into one directory while they grow.

Requests and answers are plain values, so that any call that reaches the other machine will do. A live file only grows,
and its new bytes are appended; any other file is replaced whole. A file that is gone there goes here once all that is
new has come: the part that a live file became is always here before the live file goes.
"""

import json
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
    """Some bytes of a file. `size` is that of the whole file, in bytes."""

    path: str
    stamp: int
    offset: int
    data: bytes
    size: int


class Changes(NamedTuple):
    """What is new in a trace, at most `CHUNK_BYTES` of it. Ask again where it is not all."""

    pieces: list[Piece]
    present: list[str]
    is_all: bool


def changes_since(directory: Path, known: Mapping[str, tuple[int, int]]) -> Changes:
    """Return what is new in a trace. To be called on the machine where it is written."""
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
    return Changes(pieces, present, is_all)


def files_of(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield parts before live files, but list them after: of a live file that becomes a part one of the two is seen."""
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


class JoinedTrace:
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
            remedy = "name another one with -o"
            raise TraceError(f"cannot write a trace to {directory}: {error}", remedy=remedy) from None
        if lock is None:
            remedy = "name another one with -o, or remove that one"
            raise TraceError(f"{directory} already holds a trace", remedy=remedy)
        self._lock = lock

    def known(self, node: str) -> Known:
        return dict(self._node(node).known)

    @property
    def n_ranks(self) -> int:
        return sum(len(each.run.get("ranks", ())) for each in self._nodes.values())

    def apply(self, node: str, changes: Changes) -> None:
        """Write a node's changes. OSError if the disk takes no more; ValueError, TraceError: the node sent nonsense."""
        here = self._node(node)
        for piece in changes.pieces:
            self._write(node, here, piece)
        if changes.is_all:
            for path in set(here.known) - set(changes.present):
                del here.known[path]
                (self.directory / self._place(here, path)).unlink(missing_ok=True)

    def close(self) -> None:
        """Write what has come to `run.json`, and let others write here."""
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
            here.run = _read_object(file)
            file.unlink()
            self._write_run()
        else:
            os.replace(file, target)

    def _place(self, here: _Node, path: str) -> str:
        """Return where a node's file goes. TraceError for a name that leads out of the directory."""
        if path.startswith("/") or ".." in Path(path).parts or Path(path).name == LOCK_FILE:
            raise TraceError(f"a node named a file {path!r}, which is none of a trace")
        return _RANK.sub(lambda found: f"rank={self._rank(here, int(found[1]))}", path)

    def _rank(self, here: _Node, rank: int) -> int:
        if rank not in here.ranks:
            taken = {number for each in self._nodes.values() for number in each.ranks.values()}
            here.ranks[rank] = rank if rank not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
        return here.ranks[rank]

    def _write_run(self) -> None:
        """Write one `run.json`: the facts of the node with the lowest rank, and the ranks and refusals of all."""
        nodes = {name: each for name, each in self._nodes.items() if each.run}
        ranks = {
            name: [{**rank, "rank": self._rank(here, rank["rank"]), "node": name} for rank in here.run.get("ranks", ())]
            for name, here in nodes.items()
        }
        refused = [{**each, "node": name} for name, here in nodes.items() for each in here.run.get("refused", ())]
        first = min(nodes, key=lambda name: min((rank["rank"] for rank in ranks[name]), default=1 << 30))
        closed = [int(here.run.get("closed_ns") or 0) for here in nodes.values()]
        run = {**nodes[first].run, **self._facts}
        run["ranks"] = sorted((rank for those in ranks.values() for rank in those), key=lambda rank: rank["rank"])
        run["closed_ns"] = max(closed) if all(closed) else None
        run |= {"refused": refused} if refused else {}
        if len(nodes) > 1:
            run |= _retention_of_all({name: here.run for name, here in nodes.items()})
            run.pop("thinned", None)  # each node has cut its own steps
        write_json(self.directory / RUN_FILE, run)


def _retention_of_all(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the retention of each node did, for `run.json`."""
    windows = {name: run["thinned"] for name, run in runs.items() if run.get("thinned")}
    excess = sum(int(run.get("excess_bytes") or 0) for run in runs.values())
    failed = [f"node {name}: {run['compaction_error']}" for name, run in runs.items() if run.get("compaction_error")]
    facts = {"thinned_by_node": windows, "excess_bytes": excess, "compaction_error": "; ".join(failed)}
    return {name: fact for name, fact in facts.items() if fact}


def _read_object(file: Path) -> dict[str, Any]:
    found: Any = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return found
