"""A part is one file and one line in a list: the session knows what to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mxprobe.agent import session
from mxprobe.agent.context import Context
from mxprobe.agent.part import Job, Part
from mxprobe.agent.parts import all_parts
from mxprobe.schema import TableRow
from tests.standin_controller import controlled, wait_for
from tests.watched_run import Run, agent_beside, errors_told, fingerprint_alone, what_is_left

SIGNAL = {"source": "toy", "framework": "toy", "raw_key": "n_calls", "metric": "", "estimator": ""}


class CallCounter(Part):
    """Counts the calls of the root in probed steps."""

    name = "toy"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._roots: Sequence[nn.Module] = ()
        self._handles: list[Any] = []
        self.n_calls = self.n_removed = 0

    def watch(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots

    def begin(self) -> None:
        self.n_calls = 0
        if self._context.clock.probed:
            hook = self._context.guard.hook(self.name, self._on_call)
            self._handles = [root.register_forward_hook(hook) for root in self._roots]

    def _on_call(self, *_: Any) -> None:
        self.n_calls += 1

    def finish(self) -> Iterable[Job]:
        self._take_out()
        row = {"step": self._context.clock.step, "time_ns": 0, **SIGNAL, "value": float(self.n_calls)}
        rows: list[TableRow] = [("signals", row)]
        return [Job(lambda: rows)] if self._context.clock.probed else ()

    def _take_out(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def remove(self) -> None:
        self._take_out()
        self._roots = ()
        self.n_removed += 1

    def status(self) -> dict[str, Any]:
        return {"toy_calls": self.n_calls}


def fail(*_: Any) -> Any:
    raise RuntimeError("planted")


CALLED = ("watch", "begin", "finish", "boundary", "remove", "rows", "status", "close", "ask")
Broken = type("Broken", (Part,), {"name": "broken", **dict.fromkeys(CALLED, fail)})
"""Fails wherever it is called."""


@pytest.mark.parametrize("with_broken", [False, True])
def test_a_part_is_watched_measured_told_of_and_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_broken: bool
) -> None:
    made: list[CallCounter] = []

    def with_toy(context: Context, *others: Any) -> list[Part]:
        made.append(CallCounter(context))
        return [*([Broken()] if with_broken else []), *all_parts(context, *others), made[-1]]

    monkeypatch.setattr(session, "all_parts", with_toy)
    run = Run()
    with controlled(tmp_path, every=2, error_budget=10**6, max_overhead=0.0, whatifs=()) as controller:
        with agent_beside(controller) as thread:
            wait_for(lambda: run.step() or len(controller.rows.get("signals", [])) > 2, "the toy's rows do not come")
            controller.send({"verb": "status"})
            controller.send({"verb": "detach"})
            wait_for(lambda: run.step() or not thread.is_alive(), "the agent stays")
        status, detached = controller.frame("status"), controller.frame("detached")
    assert {row["value"] for row in controller.rows["signals"] if row["source"] == "toy"} == {3.0}
    assert "toy_calls" in status
    assert "toy_calls" in detached
    assert "toy_calls" in controller.frame("attached")
    assert made[0].n_removed == 1
    assert what_is_left(run.model) == {}
    assert run.fingerprint() == fingerprint_alone(len(run.losses))
    assert len(controller.rows["tensors"]) > 0
    assert any(detail.startswith("broken: ") for detail in errors_told(controller)) == with_broken
    assert bool(errors_told(controller)) == with_broken


def test_the_session_names_no_part() -> None:
    source = Path(session.__file__).read_text()
    assert "mxprobe.agent.parts." not in source
    assert len(source.splitlines()) <= 250
