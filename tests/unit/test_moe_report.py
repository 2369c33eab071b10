"""From a planted expert to its name on the page: rows of a real tiny MoE, a trace, its summary, the section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from mxprobe.agent.module_rows import NOT_REPLAYED
from mxprobe.agent.recorder import to_columns
from mxprobe.attribution.mixture import Mixture, Standout
from mxprobe.protocol import AgentConfig
from mxprobe.trace import TraceWriter, open_trace
from mxprobe.trace.arrow import columns_of
from mxprobe.trace.chunks import chunks
from mxprobe.trace.thinning import Windows, add_up
from mxprobe_reports import coverage_card, shell
from mxprobe_reports import experts_card as page
from tests.moe_models import tiny, tokens
from tests.report_frames import modules_table, recommendation
from tests.unit.test_moe_experts import Watched, rows_of

GATE = "model.layers.0.mlp.gate"
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def mixture(written: Path) -> Mixture:
    return Mixture.of(open_trace(written))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a layer whose expert 3 has outliers in its weights, a router, flips and log-probabilities."""
    directory = tmp_path_factory.mktemp("moe") / "run.mxprobe"
    model = tiny(experts=8)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[3, :, ::32] *= 40.0
    with TraceWriter(directory, {}) as writer:
        for step in (1, 2):
            watched = Watched(experts, every=True, name=LAYER)
            ids = tokens(4, 40, seed=step)
            model(ids, labels=ids).loss.backward()
            for snapshot in watched.end().values():
                snapshot.step = step
                for table, rows in rows_of(snapshot, AgentConfig(whatifs=(), experts=2)).items():
                    writer.append(table, to_columns(table, rows))
            when = {"step": step, "time_ns": step, "module": GATE}
            writer.append("routing", to_columns("routing", [{**when, **ROUTING}]))
            writer.append("routing_flips", to_columns("routing_flips", [{**when, **FLIPS}]))
            drawn = {"step": step, "time_ns": step, "source": "generation", "temperature": 1.0, "dtype": "float32"}
            rollouts = [{**drawn, **ROLLOUT, **part} for part in PARTS]
            writer.append("rollouts", to_columns("rollouts", rollouts))
    return directory


ROUTING: dict[str, Any] = {
    "micro_step": 0,
    "phase": "train",
    "format": "mxfp4",
    "rule": "rceil",
    "sampled_frac": 1.0,
    "n_tokens": 100,
    "top_k": 2,
    "by_logits": True,
    "sum_margin": 30.0,
    "sum_margin2": 12.0,
    "sum_logit2": 400.0,
    "sum_error2": 4.0,
    "sum_ran_error2": 0.0,
    "sum_chance": 14.0,
    "n_predicted": 17,
    "n_slots_predicted": 18,
    "n_observed": 0,
    "n_slots_observed": 0,
}
FLIPS = {"top_k": 2, "n_tokens": 40, "n_flipped": 10, "n_slots": 11}
ROLLOUT: dict[str, Any] = {
    "n_sequences": 4,
    "n_unmatched": 0,
    "n_nonfinite": 0,
    "n_outside_clip": 0,
    "n_false_clip": None,
    **dict.fromkeys(("sum_d", "sum_abs_d", "max_abs_d", "sum_k3", "sum_w", "sum_w2", "sum_dp", "sum_abs_dp"), 1.0),
    "sum_entropy_rollout": 1.0,
    "sum_entropy_train": 1.0,
    **dict.fromkeys(("sum_u", "sum_u2", "sum_u_d"), None),
}
PARTS: list[dict[str, Any]] = [
    {"stratum": "all", "n_tokens": 40, "sum_d2": 1.0},
    {"stratum": "routing_same", "n_tokens": 30, "sum_d2": 0.2},
    {"stratum": "routing_flipped", "n_tokens": 10, "sum_d2": 0.8},
]


def test_the_planted_expert_stands_out_in_its_weights(mixture: Mixture):
    found = [each for each in mixture.standouts() if each.role == "w_fwd"]
    assert [(each.module, each.expert, each.measure) for each in found] == [(f"{LAYER}.gate_up_proj", 3, "zeroed")]
    assert found[0].value > 0.6
    assert found[0].median == pytest.approx(0.11, abs=0.02)


def test_quantiles_are_averaged_over_steps(mixture: Mixture):
    tokens_of = mixture.spread[f"{LAYER}.gate_up_proj", "x_fwd", "train", 0, "rows"]
    assert (tokens_of["n_experts"], tokens_of["n_steps"]) == (8.0, 1.0)
    assert 0 < tokens_of["q0"] < tokens_of["q50"] < tokens_of["q100"] < 320


def test_routing_is_added_and_the_flipped_tokens_share_told(mixture: Mixture):
    (router,) = mixture.routing
    assert (router["n_tokens"], router["n_predicted"]) == (200.0, 34.0)
    assert mixture.flips[GATE]["n_flipped"] == 20.0
    assert mixture.flipped is not None
    assert (mixture.flipped.tokens_frac, mixture.flipped.mismatch_frac) == (0.25, pytest.approx(0.8))


def test_the_page_names_layer_expert_and_router(mixture: Mixture):
    html = page.section(mixture)
    assert '<a href="#experts">Experts</a>' in shell.page("run", ["steps"], [html], {})
    assert f"<code>{LAYER}.gate_up_proj</code></td><td" in html
    assert GATE in html
    assert "25.0 %" in html
    assert "17.0 %" in html


def test_a_trace_without_experts_has_no_such_section(tmp_path: Path):
    with TraceWriter(tmp_path / "run.mxprobe", {}) as writer:
        writer.append("events", {"step": [1], "time_ns": [1], "kind": ["attached"], "detail": ["a"]})
    mixture = Mixture.of(open_trace(tmp_path / "run.mxprobe"))
    assert mixture.is_empty
    assert page.section(mixture) == page.section(None) == ""


def test_nothing_stands_out_where_all_are_alike():
    layer: dict[str, Any] = dict.fromkeys(("q0", "q25", "q50", "q75", "q100"), 0.1)
    spread = {("a", "x_fwd", "train", 0, measure): layer for measure in ("zeroed", "output_error")}
    mixture = Mixture(spread, [ALIKE], [], {}, None, ())
    assert mixture.standouts() == [Standout("a", "x_fwd", "train", 0, 0, "output_error", 0.25, 0.1)]


ALIKE: dict[str, Any] = {
    "module": "a",
    "role": "x_fwd",
    "phase": "train",
    "rank": 0,
    "expert": 0,
    "n": 100.0,
    "n_zeroed": 12.0,
    "out_ref2": 1.0,
    "out_e2": 0.25,
}


def test_experts_of_one_number_on_two_ranks_are_two(tmp_path: Path):
    when = {"step": 1, "time_ns": 1, "micro_step": 0, "module": "a", "role": "w_fwd", "phase": "train"}
    quantiles = dict.fromkeys(("q0", "q10", "q25", "q50", "q75", "q90", "q100"), 0.1)
    with TraceWriter(tmp_path / "run.mxprobe", {}) as writer:
        for rank in range(2):
            layer = {**when, "n_steps": 1, "n_experts": 4, "n_called": 4, "n_measured": 4, "n_one_token": 0}
            spread = {**layer, "measure": "output_error", **quantiles}
            writer.append("expert_spread", {name: [value] for name, value in spread.items()}, rank=rank)
            expert = {**layer, "expert": 3, "n": 8, "n_zeroed": 1, "out_ref2": 1.0, "out_e2": 0.1 + 0.8 * rank}
            expert = {name: value for name, value in expert.items() if name not in ("n_measured", "n_one_token")}
            writer.append("experts", {name: [value] for name, value in expert.items()}, rank=rank)
    mixture = Mixture.of(open_trace(tmp_path / "run.mxprobe"))
    found = mixture.standouts()
    assert [(each.rank, each.expert, each.value) for each in found] == [(1, 3, 0.9)]
    assert set(mixture.layers()) == {("a", "train")}


def test_coverage_says_what_replays_leave_out():
    frame = modules_table(["a.q_proj", "a.experts.down_proj"])
    frame["reason"] = [NOT_REPLAYED if "experts" in name else "" for name in frame["module"]]
    recommended = recommendation(["a.q_proj"])
    assert "1 of them are no nn.Linear" in coverage_card.section(recommended, frame)
    frame["reason"] = ""
    assert "no nn.Linear" not in coverage_card.section(recommended, frame)


def test_steps_that_were_added_up_tell_the_same(written: Path, mixture: Mixture):
    def added(table: str) -> pd.DataFrame:
        rows = pa.concat_tables(chunks(written, table, list(columns_of(table)))).select(list(columns_of(table)))
        return add_up(table, rows, Windows(np.array([1]), 3)).to_pandas()

    spread = added("expert_spread")
    assert (spread["step"] == 1).all()
    for row in spread.to_dict("records"):
        before = mixture.spread[row["module"], row["role"], row["phase"], 0, row["measure"]]
        assert row["n_steps"] == 2
        assert row["q50"] / row["n_steps"] == pytest.approx(before["q50"])
    experts = added("experts").set_index(["module", "role", "expert"])
    for row in mixture.experts:
        place = (row["module"], row["role"], row["expert"])
        assert experts.loc[place, "n_zeroed"] == row["n_zeroed"]
        assert experts.loc[place, "out_e2"] == pytest.approx(row["out_e2"])
    (router,) = added("routing").to_dict("records")
    assert (router["n_tokens"], router["top_k"], router["by_logits"]) == (200, 2, True)
