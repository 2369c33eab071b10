"""One aggregation, several engines: the same sums as pandas makes of the whole table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mxprobe.attribution import recommend
from mxprobe.errors import UsageError
from mxprobe.schema import ENGINES
from mxprobe.trace import TraceWriter, open_trace
from mxprobe.trace.aggregation import BIN, COUNT, Aggregation
from tests import synthetic

BY_BIN = Aggregation(
    "whatif",
    ("correction", BIN, "role"),
    ("out_e2", "n"),
    {"role": ["x_fwd"]},
    {step: step // 10 for step in range(30)},
)
CASES = {
    "names": Aggregation("whatif", ("module", "correction"), ("out_e2", "n")),
    "bins": BY_BIN,
    "step and rank": Aggregation("whatif", ("step", "rank"), ("out_e2",)),
    "of nothing": Aggregation("whatif", (), ("out_e2",)),
    "counts": Aggregation("whatif", ("rule",)),
    "none selected": Aggregation("whatif", ("module",), ("out_e2",), {"role": ["g_dgrad"]}),
    "an empty table": Aggregation("updates", ("module",), ("sum_w2",)),
}


def fill(writer: TraceWriter) -> None:
    rng = np.random.default_rng(0)
    for step in range(40):
        for rank in (0, 2):
            n = 12
            values = rng.standard_normal(n) * 10.0 ** rng.integers(-9, 9, n)
            values[step % n] = [np.nan, np.inf][step % 2]
            rows = {
                "step": [step] * n,
                "module": [f"it's m{i % 4}" for i in range(n)],
                "role": ["x_fwd", "w_fwd", None] * 4,
                "rule": ["rceil"] * n,
                "correction": ["of:0.5", "mbs:128"] * 6,
                "out_e2": [*values[:-1].tolist(), None],
                "n": rng.integers(0, 2**40, n).tolist(),
            }
            writer.append("whatif", rows, rank=rank)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts of two ranks, and live files that a killed writer left."""
    path = tmp_path_factory.mktemp("aggregation") / "run.mxprobe"
    writer = TraceWriter(path, {}, rotate_bytes=20_000)
    fill(writer)
    writer.settle()
    writer.abandon()
    assert list(path.glob("live/*/*.arrows"))
    assert list(path.glob("whatif/*/*.parquet"))
    return path


def expected(directory: Path, aggregation: Aggregation) -> pd.DataFrame:
    rows = open_trace(directory).table(aggregation.table)
    for name, values in aggregation.where.items():
        rows = rows[rows[name].isin(list(values))]
    if aggregation.bins is not None:
        rows = rows[rows["step"].isin(list(aggregation.bins))]
        rows = rows.assign(**{BIN: rows["step"].map(aggregation.bins)})
    rows = rows.assign(**{name: rows[name].where(np.isfinite(rows[name].astype(float))) for name in aggregation.sums})
    by = list(aggregation.by)
    rows = rows.astype({name: "str" for name in by if name not in (BIN, "step", "rank")})
    grouped = rows.assign(all=0).groupby(by or ["all"], observed=True, sort=True, dropna=False)
    found = grouped[list(aggregation.sums)].sum(min_count=1).astype(float)
    found[COUNT] = grouped.size()
    return found.reset_index(drop=not by)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["arrow", "duckdb"])
def test_sums_are_those_of_pandas(directory: Path, engine: str, case: str) -> None:
    if engine == "duckdb":
        pytest.importorskip("duckdb")
    found = open_trace(directory, engine=engine).sums(CASES[case])
    wanted = expected(directory, CASES[case])
    assert list(found.columns) == [*CASES[case].by, *CASES[case].sums, COUNT]
    for name in CASES[case].by:
        assert found[name].astype(str).tolist() == wanted[name].astype(str).tolist()
    for name in (*CASES[case].sums, COUNT):
        scale = np.abs(wanted[name].fillna(0.0).to_numpy(dtype=float)).max(initial=0.0)
        np.testing.assert_allclose(
            found[name].astype(float), wanted[name].astype(float), rtol=1e-12, atol=1e-12 * scale
        )


def test_what_directories_above_are_called_is_no_column(directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    above = tmp_path / "step=77" / "rank=8"
    above.mkdir(parents=True)
    (above / "run.mxprobe").symlink_to(directory)
    case = CASES["step and rank"]
    arrow, duckdb = (open_trace(above / "run.mxprobe", engine=engine).sums(case) for engine in ("arrow", "duckdb"))
    pd.testing.assert_frame_equal(arrow, duckdb)


def test_an_engine_that_nobody_knows(directory: Path) -> None:
    with pytest.raises(UsageError, match="no engine named 'spark'"):
        open_trace(directory, engine="spark").sums(CASES["names"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_ray_gives_the_same_bits(directory: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        for case in CASES.values():
            alone, on_ray = (open_trace(directory, engine=engine).sums(case) for engine in ("arrow", "ray"))
            pd.testing.assert_frame_equal(alone, on_ray, check_exact=True)
        run = replace(synthetic.OUTLIERS, steps=6)
        trace = synthetic.write_trace(tmp_path / "run.mxprobe", run)
        answers = [json.dumps(recommend(open_trace(trace, engine=engine)).to_json()) for engine in ("arrow", "ray")]
        assert answers[0] == answers[1]
    finally:
        ray.shutdown()


def test_every_engine_is_offered_by_the_command_line() -> None:
    from mxprobe.cli import common

    assert common.ENGINES == ENGINES
