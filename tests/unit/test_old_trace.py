"""A trace of schema 1.1, whose events are words alone, is read like one of today; and of today's no words are read.

`golden/trace_1_1` is of a seeded run in one process, attached to with the code of commit 6eb1f22: a tiny Qwen3-MoE that
generates and trains. In generation q_proj computes with its transpose, o_proj with its rows in another order, k_proj
with other weights, v_proj with old ones, and expert 3 with the weights of expert 2; in evaluation a norm is noisy.
`golden/trace_1_1.json` is what that code said of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from string import Formatter
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from mxprobe.attribution import mixture, recommend, weight_changes
from mxprobe.audit import audit, searches
from mxprobe.cli import main
from mxprobe.events import TEMPLATES, Event
from mxprobe.tables import TABLES
from mxprobe.trace import Trace, TraceWriter, event_facts, open_trace
from mxprobe.trace.arrow import conform
from mxprobe_reports import quality

GOLDEN = Path(__file__).parents[1] / "golden"
SAID: dict[str, Any] = json.loads((GOLDEN / "trace_1_1.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, beside which commands may write."""
    return Path(shutil.copytree(GOLDEN / "trace_1_1", tmp_path / "old.mxprobe"))


@pytest.fixture
def blank(old: Path, tmp_path: Path) -> Path:
    """The same trace with the events of today, and no words in them."""
    trace = open_trace(old)
    with TraceWriter(tmp_path / "blank.mxprobe", trace.run) as writer:
        for table in TABLES:
            rows = trace.arrow(table)
            if table == "events":
                rows = rows.filter(rows.column("state").is_valid())
            for rank in rows.column("rank").unique().to_pylist():
                of_rank = rows.filter([each == rank for each in rows.column("rank").to_pylist()]).drop_columns(["rank"])
                columns = of_rank.to_pydict()
                if table == "events":
                    columns["detail"] = [""] * len(columns["detail"])
                if of_rank.num_rows:
                    writer.append(table, columns, rank=rank)
    return tmp_path / "blank.mxprobe"


def findings(trace: Trace) -> dict[str, Any]:
    """What is concluded from a trace, but for where it lies."""
    answer = recommend(trace)
    texts = {each.name: each.text for each in answer.evidence}
    return {
        "audit": [
            {"pitfall": each.pitfall.slug, "modules": list(each.modules), "detail": each.detail}
            for each in audit(trace).findings
        ],
        "recommend": {
            "verdict": answer.verdict.value,
            "headline": answer.headline,
            "evidence": list(texts),
            "weight_noise": texts["weight_noise"],
            "weight_lag": texts["weight_lag"],
        },
    }


def test_an_old_trace_gives_the_findings_that_it_gave(old: Path) -> None:
    assert findings(open_trace(old)) == SAID


def test_no_finding_reads_the_words(old: Path, blank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()

    def spy(rows: Any, kind: str) -> Any:
        read.add(kind)
        return event_facts.events_of(rows, kind)

    for module in (searches, weight_changes, mixture, quality):
        monkeypatch.setattr(module, "events_of", spy)
    with_words, without = open_trace(old), open_trace(blank)
    assert set(without.events()["detail"]) == {""}
    assert findings(without) == findings(with_words) == SAID
    assert mixture.Mixture.of(without).told == mixture.Mixture.of(with_words).told
    for path in (old, blank):
        page = path.with_suffix(".html")
        assert CliRunner().invoke(main, ["report", str(path), "-o", str(page)]).exit_code == 0
        html = page.read_text(encoding="utf-8")
        assert "Lost: rank 1, process 4712, ended while others went on (target_exited)." in html
        assert "expert 3 rollout: computes with the weights of expert 2" in html
    assert read
    known = with_words.events().dropna(subset=["state"])
    assert read <= set(known["kind"]), "a kind that is read is not in the trace"


def test_the_words_of_each_template_give_its_facts_back() -> None:
    values = {"n": 3, "lag": 2, "sigma": 0.25, "gap": 2.5e-5, "residual_frac": 0.5, "phase": "rollout", "role": "x_fwd"}
    told: list[Event] = []
    for kind, states in TEMPLATES.items():
        for state, template in states.items():
            names = [name for _, name, _, _ in Formatter().parse(template) if name and name != "subject"]
            data = {name: values.get(name, 7 if name.endswith("_step") else f"some {name}") for name in names}
            told.append(Event(kind, "model.layers.3.up", state, data))
    words = pa.table({"kind": [each.kind for each in told], "detail": [each.words for each in told]})
    rows = conform(words, "events").to_pandas().assign(step=1)
    for kind in TEMPLATES:
        assert [event for _, event in event_facts.events_of(rows, kind)] == [each for each in told if each.kind == kind]


READING: dict[str, Callable[[Path], list[str]]] = {
    "report": lambda t: ["report", str(t), "-o", str(t.with_suffix(".html"))],
    "report against itself": lambda t: ["report", str(t), "--against", str(t), "-o", str(t.with_suffix(".html"))],
    "recommend": lambda t: ["recommend", str(t), "--explain"],
    "compare": lambda t: ["compare", str(t), str(t)],
    "check": lambda t: ["check", str(t), "--set", "min_steps=1"],
    "export": lambda t: ["export", str(t), "--format", "csv", "-o", str(t.parent / "files")],
    "audit": lambda t: ["audit", str(t)],
    "replay": lambda t: ["replay", str(t)],
    "live": lambda t: ["live", str(t), "--once"],
}


@pytest.mark.parametrize("command", READING)
def test_every_reading_command_opens_an_old_trace(command: str, old: Path) -> None:
    result = CliRunner().invoke(main, READING[command](old))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code in ((0, 1) if command in ("audit", "check") else (0,)), result.output


def test_replay_quotes_an_old_event_where_there_are_no_replays(old: Path) -> None:
    shutil.rmtree(old / "replays")
    result = CliRunner().invoke(main, ["replay", str(old)])
    assert result.exit_code == 3
    assert "the first replay took" in " ".join(result.output.split())
