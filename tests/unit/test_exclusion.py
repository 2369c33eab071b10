"""What keeping modules out of MXFP4 buys: the greedy curve, its knee, and patterns that match exactly its modules."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mxprobe.attribution.exclusion import (
    BF16,
    DELTA2,
    EXACT,
    MXFP8,
    OUTPUT_ERROR,
    exclusion_curve,
    knee_of,
)
from mxprobe.attribution.patterns import exact_patterns
from mxprobe.cli import main
from mxprobe.measuring.replay.arms import FORWARD_ROLES, replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.sensitivity import measure_sensitivity
from mxprobe.trace import TraceWriter
from tests import small_lm
from tests.synthetic import HEALTHY, columns_of, module_names

NAMES = [f"model.layers.{i}.{kind}" for i in range(12) for kind in ("mlp.up_proj", "mlp.gate_proj", "self_attn.q_proj")]
NAMES += ["lm_head", "model.layers.1.mlp.gate", "experts[0].up_proj", "model.layers.11.mlp.up_proj2"]


def sensitivity(kl: dict[str, float], n: int = 8) -> pd.DataFrame:
    rows = [
        {"step": step, "micro_step": 0, "module": name, "role": role, "component": "total", "n_tokens": 100.0}
        | {"sum_delta2": 100.0 * value, "sum_log_prob_shift": 0.0, "sum_entropy_shift": 0.0}
        for step in range(n)
        for name, value in kl.items()
        for role in ("x_fwd", "w_fwd")
    ]  # Delta2 of each operand is `value`, so that the module's KL is `value` too
    return pd.DataFrame(rows)


def modules(flops: dict[str, float]) -> pd.DataFrame:
    return pd.DataFrame({"module": list(flops), "gemm_flops": list(flops.values())})


def test_modules_are_kept_by_what_they_buy_per_flop():
    kl = {"a.up": 8.0, "b.up": 4.0, "c.up": 0.5, "d.up": 0.5}
    curve = exclusion_curve(sensitivity(kl), modules({"a.up": 8.0, "b.up": 1.0, "c.up": 1.0, "d.up": 10.0}))
    assert curve is not None
    assert [point.module for point in curve.points] == ["", "b.up", "a.up", "c.up", "d.up"]
    assert [point.flops_frac for point in curve.points] == pytest.approx([0.0, 0.05, 0.45, 0.5, 1.0])
    assert [point.predicted_kl for point in curve.points] == pytest.approx([13.0, 9.0, 1.0, 0.5, 0.0])
    assert curve.knee == 2
    assert curve.kept == ("b.up", "a.up")
    assert curve.n_microbatches == 8


def test_what_mxfp8_leaves_stays():
    kl = {"a.up": 4.0, "b.up": 1.0, "c.up": 1.0}
    tensors = pd.DataFrame([{"module": m, "role": r, "out_e2": 2.0} for m in kl for r in ("x_fwd", "w_fwd")])
    whatif = tensors.assign(correction="mxfp8", out_e2=[0.2, 0.2, 1.0, 1.0, 0.0, 0.0])[:4]
    found = modules(dict.fromkeys(kl, 1.0))
    curve = exclusion_curve(sensitivity(kl), found, keep=MXFP8, tensors=tensors, whatif=whatif)
    assert curve is not None
    assert [point.module for point in curve.points] == ["", "a.up", "b.up"]  # c was not measured in MXFP8
    assert [point.predicted_kl for point in curve.points] == pytest.approx([5.0, 1.4, 0.9])
    assert curve.left_by == OUTPUT_ERROR
    assert exclusion_curve(sensitivity(kl), found, keep=MXFP8) is None
    own = sensitivity({"a.up": 1.0, "b.up": 0.1, "c.up": 0.2}).assign(component="mxfp8")
    both = pd.concat([sensitivity(kl), own], ignore_index=True)
    curve = exclusion_curve(both, found, keep=MXFP8, tensors=tensors, whatif=whatif)
    assert curve is not None
    assert curve.left_by == DELTA2
    assert [point.module for point in curve.points] == ["", "a.up", "b.up", "c.up"]
    assert [point.predicted_kl for point in curve.points] == pytest.approx([6.0, 3.0, 2.1, 1.3])
    assert exclusion_curve(both, found).left_by == EXACT
    assert exclusion_curve(sensitivity(kl).iloc[:0], found, keep=BF16) is None


def test_the_knee_of_a_straight_line_is_its_start():
    assert knee_of([0.0, 0.5, 1.0], [4.0, 2.0, 0.0]) == 0
    assert knee_of([0.0, 0.1, 1.0], [4.0, 1.0, 0.0]) == 1
    assert knee_of([0.0], [1.0]) == 0


@given(st.sets(st.sampled_from(NAMES)))
def test_patterns_match_exactly_the_chosen_modules(chosen: set[str]):
    for framework in ("verl", "megatron", "nemo-rl", "torch"):
        patterns = exact_patterns(framework, chosen, NAMES)
        # As they do it themselves: verl's `re.match` after `re:`, Megatron's fnmatch, a filter_fn's fullmatch.
        if framework == "verl":
            assert all(pattern.startswith("re:") for pattern in patterns)
            matched = {name for name in NAMES if any(re.match(p[3:], name) for p in patterns)}
        elif framework == "torch":
            matched = {name for name in NAMES if any(re.fullmatch(p, name) for p in patterns)}
        else:
            matched = {name for name in NAMES if any(fnmatchcase(name, p) for p in patterns)}
        assert matched == chosen


def test_a_kind_that_is_chosen_everywhere_is_one_pattern():
    chosen = [name for name in NAMES if name.endswith("q_proj")]
    assert exact_patterns("megatron", chosen, NAMES) == ["*.q_proj"]
    assert exact_patterns("verl", chosen, NAMES) == [r"re:^.*\.q_proj$"]
    assert exact_patterns("megatron", chosen[:2], NAMES) == chosen[:2]
    assert exact_patterns("torch", ["experts[0].up_proj"], NAMES) == [r"experts\[0\]\.up_proj"]


@pytest.mark.slow
def test_keeping_the_knees_modules_really_lowers_the_kl():
    """Against replays on the small model: what the curve predicts to remain is what a replay without them shows."""
    model = small_lm.trained()
    linears = small_lm.linears(model)
    rows = []
    for i in range(2):
        call = capture(model, (small_lm.batch(24, 10**6 + i),), {})
        rows += [{**row, "step": i, "micro_step": 0} for row in measure_sensitivity(call, linears, seed=i).rows()]
    flops = modules({name: float(m.weight.numel()) for name, m in linears.items()})
    curve = exclusion_curve(pd.DataFrame(rows), flops)
    assert curve is not None
    assert 0 < curve.knee < len(curve.points) - 1
    rounded = {(name, role) for name in linears if name not in curve.kept for role in FORWARD_ROLES}
    call = capture(model, (small_lm.batch(24, 10**6),), {})
    (left,) = replay_arms(call, linears, ("q",), only=rounded)
    (whole,) = replay_arms(call, linears, ("q",))
    predicted = curve.points[curve.knee].predicted_kl / curve.points[0].predicted_kl
    replayed = left.row()["sum_kl"] / whole.row()["sum_kl"]
    assert abs(predicted - replayed) < 0.15
    assert replayed < 1.0 - curve.points[curve.knee].flops_frac  # more than the share of the work that is kept


def test_recommend_tells_the_curve_and_the_pattern(tmp_path: Path):
    with TraceWriter(tmp_path / "run.mxprobe", {"config": {"rule": "rceil"}}) as writer:
        generator = torch.Generator().manual_seed(0)
        kl = {name: 10.0 ** float(torch.rand((), generator=generator) * 3 - 5) for name in module_names(HEALTHY)}
        writer.append("sensitivity", columns_of(sensitivity(kl).to_dict("records")))
        writer.append("modules", {"module": list(kl), "gemm_flops": [1.0] * len(kl), "status": ["probed"] * len(kl)})
        writer.append("outputs", {"step": [1], "module": [next(iter(kl))], "phase": ["train"], "ref2": [1.0]})
    trace = str(tmp_path / "run.mxprobe")
    done = CliRunner().invoke(main, ["recommend", trace, "--explain", "--framework", "verl"])
    assert done.exit_code == 0, done.output
    assert "Keeping modules in BF16" in done.output
    assert "<- knee" in done.output
    assert r"re:^model\\.layers" in done.output
    done = CliRunner().invoke(main, ["recommend", trace, "--json", "--framework", "verl"])
    (curve,) = json.loads(done.stdout)["exclusion"]
    assert curve["keep"] == BF16
    assert len(curve["points"]) == len(kl) + 1
    assert 0 < curve["knee"] < len(kl)
