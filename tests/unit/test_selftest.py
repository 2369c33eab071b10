"""What `mxprobe selftest` concludes from two runs; the test with real ones is marked slow."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mxprobe.cli import main
from mxprobe.selftest import backends
from mxprobe.selftest.attached import AttachedRun, Step, compare_bits, cost
from mxprobe_kernels.agreement import disagreements

ALONE = [Step(float(i).hex(), f"digest {i}", 0.1 + 0.001 * (i % 3), 0.1, 0) for i in range(60)]


def attached(steps: list[Step]) -> AttachedRun:
    return AttachedRun(steps, spans=[(10, 20, 22), (32, 40, 40)], traces=[Path("nowhere")])


def test_equal_runs_are_equal_as_far_as_both_go() -> None:
    finding = compare_bits("ptrace", attached(ALONE[:55]), ALONE)
    assert finding.ok is True
    assert "55 steps, 18 of them attached (2 x in and out): identical" in finding.detail


@pytest.mark.parametrize("part", ["loss", "digest"])
def test_one_bit_after_the_attach_is_wrong(part: str) -> None:
    steps = [*ALONE[:30], replace(ALONE[30], **{part: "other"}), *ALONE[31:]]
    finding = compare_bits("ptrace", attached(steps), ALONE)
    assert finding.ok is False
    assert "step 31 differs, after the attach" in finding.detail


def test_a_machine_that_does_not_repeat_itself_proves_nothing() -> None:
    steps = [replace(ALONE[0], digest="other"), *ALONE[1:]]
    assert compare_bits("ptrace", attached(steps), ALONE).ok is None


def test_cost_is_a_ratio_to_the_steps_right_after_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxprobe.selftest.attached.STEPS_ALONE", 8)
    costs = {range(10, 19): 0.105, range(21, 22): 0.105, range(32, 40): 0.105}  # one step's worth comes after `last`
    dearer = [replace(step, cpu_s=next((c for r, c in costs.items() if i in r), 0.1)) for i, step in enumerate(ALONE)]
    detail = cost(attached(dearer)).detail
    assert "+5.0% CPU (95 %: +5.0% to +5.0%)" in detail
    assert "steps of 100 ms" in detail


def test_every_backend_here_agrees_with_the_reference() -> None:
    found = {finding.name: finding.ok for finding in backends.check_backends()}
    assert found.pop("torch") is True
    assert False not in found.values()


def test_a_count_or_a_sum_that_is_off_is_named() -> None:
    right = {"n": 64, "n_zeroed": 3, "sum_x2": 2.0, "amax": 1.0}
    assert disagreements({**right, "sum_x2": 2.0 + 1e-7}, right, 1e-6) == []
    assert disagreements({**right, "n_zeroed": 4}, right, 1e-6) == ["n_zeroed: 4, expected 3"]
    assert len(disagreements({**right, "sum_x2": 2.1}, right, 1e-6)) == 1


@pytest.mark.slow
def test_this_machine_passes() -> None:
    done = CliRunner().invoke(main, ["selftest", "--json"])
    answer = json.loads(done.stdout)
    assert done.exit_code == 0, answer
    assert answer["ok"]
    found = {finding["name"]: finding["ok"] for finding in answer["findings"]}
    assert found["bits, listener"]
    assert found["bits, ptrace"]
    assert found["trace, ptrace"]
    assert ("GPU memory" in found) == torch.cuda.is_available()
