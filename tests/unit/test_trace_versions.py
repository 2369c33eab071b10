"""A trace that an earlier mxprobe has written opens, and no column of one goes or becomes something else."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mxprobe.attribution import recommend
from mxprobe.schema import SCHEMA_MINOR, SCHEMA_VERSION, Verdict
from mxprobe.tables import SPAN, TABLES, THINNED
from mxprobe.trace import arrow, layout, open_trace

SCHEMAS = json.loads((Path(__file__).parents[1] / "golden" / "trace_schema.json").read_text())
"""Version -> table -> column -> type. A new minor version gets a list of its own when it is released."""


def test_the_current_version_has_its_list() -> None:
    assert f"{SCHEMA_VERSION}.{SCHEMA_MINOR}" in SCHEMAS


@pytest.mark.parametrize("version", SCHEMAS)
def test_no_column_is_gone_or_has_another_type(version: str) -> None:
    for table, columns in SCHEMAS[version].items():
        assert table in TABLES, f"table {table} of {version} is gone: that takes a new SCHEMA_VERSION"
        now = arrow.columns_of(table)
        changed = {name: kind for name, kind in columns.items() if now.get(name) != kind}
        assert not changed, f"{table}: {changed} of {version} are not what they were: that takes a new SCHEMA_VERSION"


@pytest.mark.parametrize("version", SCHEMAS)
def test_a_trace_of_that_version_opens(version: str, tmp_path: Path) -> None:
    values = {"int64": 3, "int32": 3, "float64": 1.5, "bool": True, "dict": "name", "string": "text"}
    for table, columns in SCHEMAS[version].items():
        schema = pa.schema([(name, arrow.arrow_type(kind, dictionary=True)) for name, kind in columns.items()])
        ones = {name: [1] * getattr(schema.field(name).type, "list_size", 2) for name in columns}
        rows = {name: [values.get(kind, ones[name])] * 2 for name, kind in columns.items()}
        path = layout.part_path(tmp_path / "t", table, 0, 0)
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table(rows, schema=schema), path)
    major, minor = map(int, version.split("."))
    run = {"schema_version": major, "schema_minor": minor, "closed_ns": 1}
    layout.write_json(tmp_path / "t" / layout.RUN_FILE, run)
    trace = open_trace(tmp_path / "t")
    assert trace.problems == []
    for table, columns in SCHEMAS[version].items():
        frame = trace.table(table)
        assert list(frame.columns) == [*arrow.columns_of(table), "rank"]
        assert frame[list(columns)].notna().all(axis=None)
        new = [name for name in arrow.columns_of(table) if name not in columns and (name, "int64") not in SPAN]
        assert frame[new].isna().all(axis=None)
        if table in THINNED and "n_steps" not in columns:
            assert frame["n_steps"].tolist() == [1, 1]
            assert frame["last_step"].tolist() == frame["step"].tolist()
    assert recommend(trace).verdict is not Verdict.ENABLE
