"""What the flight recorder takes for a trigger, whom it names, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from mxprobe.measuring.flight_memory import MAX_DUMPS, PAST_STEPS, BlackBox, Entry, first_nonfinite

MODULES = ("embed", "0.up", "0.down", "1.up", "1.down", "head")
NONE: Mapping[str, float] = {}


def entry(
    step: int, *, outputs: Mapping[str, float] = NONE, gradients: Mapping[str, float] = NONE, scale: float = 1.0
) -> Entry:
    return Entry(
        step,
        0,
        {name: (outputs.get(name, 1.0), 8) for name in MODULES},
        {f"{name}.weight": (gradients.get(name, scale), 16) for name in reversed(MODULES)},
    )


def fed(n: int, follow_steps: int = 3) -> BlackBox:
    box = BlackBox(follow_steps)
    for step in range(1, n + 1):
        assert box.add(entry(step, scale=1.0 + 0.1 * math.sin(step))) == (None, [])
    return box


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["step"] for row in rows})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_bad_output_is_named_in_order_of_execution(bad: float) -> None:
    why, rows = fed(10).add(entry(11, outputs={"1.up": bad, "head": bad}, gradients=dict.fromkeys(MODULES, bad)))
    assert why is not None
    assert why.words == "nonfinite: first bad module in order of execution: 1.up (output); with 10 steps before it"
    assert steps_of(rows) == list(range(1, 12))
    assert [row["name"] for row in rows if row["step"] == 11 and row["kind"] == "output"] == list(MODULES)
    assert {row["position"] for row in rows if row["name"].startswith("1.up")} == {3}


def test_where_outputs_are_finite_the_first_in_the_backward_pass_is_named() -> None:
    bad = entry(1, gradients={"embed": math.nan, "0.up": math.nan, "0.down": math.inf})
    assert first_nonfinite(bad) == ("0.down.weight", "gradient")


def test_what_follows_is_written_and_a_run_that_stays_bad_is_told_once() -> None:
    box = fed(20)
    assert box.add(entry(21, outputs={"head": math.nan}))[0] is not None
    for step in range(22, 25):
        why, rows = box.add(entry(step, outputs={"head": math.nan}))
        assert (why, steps_of(rows)) == (None, [step])
    assert box.add(entry(25, outputs={"head": math.nan})) == (None, [])
    assert box.add(entry(26)) == (None, [])
    again = box.add(entry(27, outputs={"head": math.nan}))[0]
    assert again is not None
    assert (again.subject, again.state) == ("head", "nonfinite")


def test_a_spike_is_one_against_the_past_and_names_what_grew() -> None:
    box = fed(20)
    assert box.add(entry(21, scale=9.0)) == (None, [])
    why, rows = box.add(entry(22, outputs={"0.down": 50.0, "head": 50.0}, gradients={"embed": 500.0}))
    assert why is not None
    assert (why.subject, why.state) == ("0.down", "spike")
    assert why.words.startswith("spike: gradient norm 500")
    assert "first in order of execution: 0.down (output, 50.0 x its median)" in why.words
    assert steps_of(rows) == list(range(1, 23))
    why, _ = fed(20).add(entry(21, gradients={"1.up": 500.0}))
    assert why is not None
    assert "1.up.weight (gradient, " in why.words


def test_nothing_is_a_spike_before_there_is_a_past() -> None:
    assert fed(10).add(entry(11, scale=1e6)) == (None, [])


def test_the_past_is_bounded_and_written_once() -> None:
    box = fed(3 * PAST_STEPS)
    why, rows = box.trigger("mxprobe trigger")
    assert why is not None
    assert why.words.startswith("asked: mxprobe trigger")
    assert len(steps_of(rows)) == PAST_STEPS
    assert box.trigger("again")[1] == []


def test_triggers_without_end_do_not_fill_the_trace() -> None:
    box = BlackBox(0)
    told: list[str] = []
    for step in range(4 * MAX_DUMPS):
        why, rows = box.add(entry(step, outputs={"head": math.nan if step % 2 else 1.0}))
        told += [] if why is None else [why.words]
        assert not rows or len(told) <= MAX_DUMPS
    assert len(told) == 2 * MAX_DUMPS
    assert "not written" in told[-1]
