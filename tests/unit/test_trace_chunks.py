"""Reading a table piece by piece: the same rows as whole, cut by steps, whatever state the trace is in."""

from pathlib import Path

import pandas as pd
import pytest

from mxprobe.errors import TraceError
from mxprobe.trace import TraceWriter, compact, layout, open_trace
from mxprobe.trace.arrow import ROWS_PER_PIECE
from mxprobe.trace.chunks import chunks, count_rows, step_ranges

COLUMNS = ("step", "module", "sum_e2", "delta_hist")


def rows(first: int, n_steps: int) -> dict[str, list[object]]:
    steps = [step for step in range(first, first + n_steps) for _ in range(3)]
    return {
        "step": steps,
        "module": ["a", "b", "c"] * n_steps,
        "sum_e2": [float(step) for step in steps],
        "delta_hist": [[step] * 32 for step in steps],
    }


def read(directory: Path, **options: object) -> pd.DataFrame:
    frames = [chunk.to_pandas() for chunk in chunks(directory, "tensors", COLUMNS, **options)]  # type: ignore[arg-type]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"step": []})


def same(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    return all([str(x) for x in a[name]] == [str(y) for y in b[name]] for name in ("rank", *COLUMNS))


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path / "run.mxprobe", {}) as writer:
        for rank in (0, 1):
            for step in range(1, 21):
                writer.append("tensors", rows(step, 1), rank=rank)
    return tmp_path / "run.mxprobe"


def test_pieces_are_the_rows_of_the_whole(closed: Path) -> None:
    assert same(read(closed), open_trace(closed).tensors())
    assert count_rows(closed, "tensors") == 2 * 20 * 3
    assert same(pd.concat([c.to_pandas() for c in open_trace(closed).chunks("tensors", COLUMNS)]), read(closed))


def test_steps_choose_rows_and_row_groups(closed: Path) -> None:
    chosen = read(closed, steps=[range(3, 5), range(19, 20)])
    assert sorted(set(chosen["step"])) == [3, 4, 19]
    assert len(chosen) == 2 * 3 * 3
    assert read(closed, steps=[range(900, 901)]).empty
    assert step_ranges(closed, "tensors") == [range(1, 21), range(1, 21)]


def test_live_batches_follow_the_parts_and_none_twice(tmp_path: Path) -> None:
    directory = tmp_path / "run.mxprobe"
    writer = TraceWriter(directory, {})
    for step in (1, 2, 3):
        writer.append("tensors", rows(step, 1))
    assert read(directory)["step"].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    live = layout.live_path(directory, "tensors", 0)
    kept = live.read_bytes()
    writer.abandon()
    compact(directory)
    live.parent.mkdir(parents=True)
    live.write_bytes(kept)  # as if the machine had stopped between writing the part and removing the live file
    assert read(directory)["step"].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_live_file_compacted_meanwhile_is_read_as_the_part_it_became(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run.mxprobe", {})
    writer.append("tensors", rows(1, 2), rank=0)
    writer.append("tensors", rows(7, 2), rank=1)
    pieces = chunks(tmp_path / "run.mxprobe", "tensors", COLUMNS)
    seen = [next(pieces)]
    writer.close()  # rank 1 becomes a part between its listing and its turn
    seen += list(pieces)
    assert [step for piece in seen for step in piece.column("step").to_pylist()] == [1] * 3 + [2] * 3 + [7] * 3 + [
        8
    ] * 3


def test_long_live_files_come_in_several_pieces(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run.mxprobe", {})
    per_batch = ROWS_PER_PIECE // 3 // 2 + 1
    for first in (0, per_batch, 2 * per_batch):
        writer.append("overhead", {"step": list(range(first, first + per_batch)) * 3})
    sizes = [piece.num_rows for piece in chunks(tmp_path / "run.mxprobe", "overhead", ("step",))]
    writer.close()
    assert len(sizes) == 2
    assert sum(sizes) == 9 * per_batch


def test_a_damaged_part_is_named(closed: Path) -> None:
    part = layout.part_files(closed, "tensors")[0].path
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(TraceError, match="damaged"):
        read(closed)


def test_columns_an_older_trace_lacks_are_null(closed: Path) -> None:
    whole = next(iter(chunks(closed, "tensors", ("out_saturated2",))))
    assert whole.column("out_saturated2").null_count == whole.num_rows
    assert whole.column_names == ["out_saturated2", "rank"]
