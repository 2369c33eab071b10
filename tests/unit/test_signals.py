"""Taps: one record per call, the run's functions back afterwards, and nothing of ours that could disturb it."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mxprobe.agent.taps.scalars import scalar
from mxprobe.agent.taps.signal_taps import NO_STEP, SignalTaps
from mxprobe.agent.taps.splicing import TapNotApplicableError, splice
from mxprobe.agent.taps.tap_table import FRAMEWORK_PACKAGES, TAPS, Tap
from mxprobe.events import Event
from tests import standin_sinks
from tests.standin_sinks import WandbRun


class Heard:
    """`SignalTaps` and what it says. Only modules given to `add` are seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for tap in TAPS:
            monkeypatch.delitem(sys.modules, tap.module, raising=False)
        for package in (*FRAMEWORK_PACKAGES, "wandb"):
            monkeypatch.delitem(sys.modules, package, raising=False)
        self._monkeypatch = monkeypatch
        self.rows: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.taps = SignalTaps(self.rows.extend, self._on_error, lambda event: self.events.append(event.words))

    def _on_error(self, where: str, error: BaseException) -> None:
        self.errors.append((where, error))

    def add(self, *modules: ModuleType) -> None:
        """Import the modules, so to speak, and come to a step boundary."""
        standin_sinks.install(self._monkeypatch, {module.__name__: module for module in modules})
        self.taps.ensure_wrapped()

    @property
    def said(self) -> list[tuple[str, int, float]]:
        return [(row["raw_key"], row["step"], row["value"]) for row in self.rows]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    heard = Heard(monkeypatch)
    yield heard
    heard.taps.unwrap()
    assert heard.errors == []


@pytest.fixture
def run() -> WandbRun:
    return WandbRun()


def add_wandb(heard: Heard, run: WandbRun) -> ModuleType:
    modules = standin_sinks.wandb(run)
    heard.add(*modules.values())
    return modules["wandb"]


def test_a_call_through_two_sinks_is_one_record(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    module, tracking = standin_sinks.verl(run)
    heard.add(module)
    tracking.log({"actor/entropy": 0.5, "note": "text"}, step=3)
    assert heard.said == [("actor/entropy", 3, 0.5)]
    assert heard.rows[0]["source"] == "verl.utils.tracking.Tracking.log"
    assert heard.rows[0]["framework"] == "verl"
    assert run.written == [({"actor/entropy": 0.5, "note": "text"}, 3)]


def test_the_original_functions_are_back(heard: Heard, run: WandbRun) -> None:
    before = vars(WandbRun)["log"]
    module = add_wandb(heard, run)
    slime = standin_sinks.step_keyed("slime.utils.logging_utils")
    slime_log = slime.log
    heard.add(slime)
    assert vars(WandbRun)["log"] is not before
    assert slime.log is not slime_log
    heard.taps.unwrap()
    assert vars(WandbRun)["log"] is before
    assert slime.log is slime_log
    assert module.log.__func__ is before
    heard.taps.ensure_wrapped()
    assert vars(WandbRun)["log"] is before


def test_a_module_function_bound_before_the_attach_is_heard(heard: Heard, run: WandbRun) -> None:
    module = add_wandb(heard, run)  # `wandb.log` was bound to the run, and to the original, by `wandb.init`
    module.log({"loss": 1.0}, step=4)
    assert heard.said == [("loss", 4, 1.0)]


def test_the_very_object_that_was_bound_comes_back(heard: Heard, run: WandbRun) -> None:
    modules = standin_sinks.wandb(run)
    bound = modules["wandb"].log
    heard.add(*modules.values())
    heard.taps.unwrap()
    assert modules["wandb"].log is bound


def test_a_run_begun_under_the_tap_keeps_its_own_log(heard: Heard, run: WandbRun) -> None:
    module = add_wandb(heard, run)
    second = WandbRun()
    module.log = second.log  # a second `wandb.init`
    heard.taps.unwrap()
    module.log({"loss": 2.0})
    assert second.written == [({"loss": 2.0}, None)]
    assert run.written == []
    assert module.log.__func__ is vars(WandbRun)["log"]


def test_a_tap_that_was_wrapped_again_passes_calls_on(heard: Heard, run: WandbRun, monkeypatch: Any) -> None:
    add_wandb(heard, run)
    ours = vars(WandbRun)["log"]

    def theirs(self: WandbRun, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    monkeypatch.setattr(WandbRun, "log", theirs)
    heard.taps.unwrap()
    run.log({"loss": 1.0})
    assert vars(WandbRun)["log"] is theirs
    assert run.written == [({"loss": 1.0}, None)]
    assert heard.rows == []
    assert any("was wrapped again" in event for event in heard.events)
    monkeypatch.undo()


def test_a_sink_imported_after_the_attach_is_tapped_at_the_next_boundary(heard: Heard, run: WandbRun) -> None:
    heard.taps.ensure_wrapped()
    run.log({"loss": 1.0})
    add_wandb(heard, run)
    run.log({"loss": 0.5})
    assert heard.said == [("loss", NO_STEP, 0.5)]


def test_a_module_that_is_still_importing_is_left_alone(heard: Heard, run: WandbRun) -> None:
    module = standin_sinks.wandb(run)["wandb.sdk.wandb_run"]
    spec = ModuleType("spec")
    vars(spec)["_initializing"] = True
    vars(module)["__spec__"] = spec
    del module.Run
    heard.add(module)
    assert heard.events == []
    vars(spec)["_initializing"] = False
    module.Run = WandbRun
    heard.taps.ensure_wrapped()
    assert heard.events == ["wandb.sdk.wandb_run.Run.log (wandb)"]


def test_another_signature_is_not_tapped_and_said(heard: Heard) -> None:
    heard.add(standin_sinks.prime_rl_of_summer())
    assert heard.events == [
        "tap not applicable: prime_rl.monitors.log has signature (metrics: 'dict[str, Any]', step: 'int') -> 'None', "
        "expected parameters data, step"
    ]


def test_a_module_function_with_a_self_is_not_tapped() -> None:
    """swanlab 0.10 decorates `swanlab.log` with the signature of `Run.log`."""
    module = ModuleType("m")
    vars(module)["log"] = functools.wraps(WandbRun.log)(lambda *args, **kwargs: None)
    tap = Tap("m", "", "log", ("data", "step"), lambda arguments: [], "m")
    with pytest.raises(TapNotApplicableError, match=r"has signature \(self, data"):
        splice(tap, module, lambda tap, arguments: True)


def test_a_decorator_that_hides_the_signature_is_seen_through(heard: Heard) -> None:
    """As accelerate's `on_main_process`."""

    def on_main_process(function: Any) -> Any:
        def execute(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return execute

    class Accelerator:
        is_main_process = True
        written: list[Any] = []  # noqa: RUF012

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.written.append((values, step))

    module = ModuleType("accelerate.accelerator")
    vars(module)["Accelerator"] = Accelerator
    heard.add(module)
    Accelerator().log({"loss": 1.0}, 3)
    Accelerator.is_main_process = False
    Accelerator().log({"loss": 1.0}, 4)
    assert heard.said == [("loss", 3, 1.0)]
    assert [step for _, step in Accelerator.written] == [3, 4]


def test_another_owner_is_not_tapped_and_said(heard: Heard) -> None:
    heard.add(ModuleType("verl.utils.tracking"))
    assert heard.events == ["tap not applicable: verl.utils.tracking has no class Tracking"]


@pytest.mark.parametrize(
    ("member", "words"), [(None, "is missing"), (staticmethod(print), "is a staticmethod"), (print, "is a builtin_")]
)
def test_only_functions_are_wrapped(member: Any, words: str) -> None:
    owner = type("Owner", (), {} if member is None else {"log": member})
    module = ModuleType("m")
    vars(module)["Owner"] = owner
    tap = Tap("m", "Owner", "log", (), lambda arguments: [], "m")
    with pytest.raises(TapNotApplicableError, match=words):
        splice(tap, module, lambda tap, arguments: True)
    assert vars(owner).get("log") is member


def test_what_a_sink_raises_reaches_the_caller(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    with pytest.raises(TypeError, match="log"):
        run.log()  # type: ignore[call-arg]
    assert [where for where, _ in heard.errors] == ["wandb.sdk.wandb_run.Run.log"]
    heard.errors.clear()
    run.log({"loss": 1.0})
    assert heard.said == [("loss", NO_STEP, 1.0)]


def test_a_call_that_is_not_understood_is_heard_below(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)

    class Tracking:
        def log(self, data: Any, step: Any) -> None:
            run.log({"reward": data[0]}, step=step)

    module = ModuleType("verl.utils.tracking")
    vars(module)["Tracking"] = Tracking
    heard.add(module)
    Tracking().log([0.25], 2)
    assert heard.said == [("reward", 2, 0.25)]
    assert [where for where, _ in heard.errors] == ["verl.utils.tracking.Tracking.log"]
    heard.errors.clear()


def test_threads_do_not_silence_each_other(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    inside, done = threading.Event(), threading.Event()

    class Tracking:
        def log(self, data: Any, step: Any, backend: Any = None) -> None:
            inside.set()
            assert done.wait(10)

    module = ModuleType("verl.utils.tracking")
    vars(module)["Tracking"] = Tracking
    heard.add(module)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(Tracking().log, {"actor/entropy": 0.5}, 1)
        assert inside.wait(10)
        run.log({"loss": 1.0}, step=2)
        done.set()
        slow.result(10)
    assert sorted(heard.said) == [("actor/entropy", 1, 0.5), ("loss", 2, 1.0)]


def test_coroutines_are_heard_per_task(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    module = standin_sinks.prime_rl(run)
    original = module.log
    heard.add(module)
    assert asyncio.iscoroutinefunction(module.log)

    async def other() -> None:
        run.log({"other": 1.0}, step=9)

    async def main() -> None:
        await asyncio.gather(
            module.log({"entropy/all/mean": 0.5}, 1), other(), module.log({"optim/grad_norm": 2.0}, step=1)
        )
        await module.log(["an episode"], 1)

    asyncio.run(main())
    assert sorted(heard.said) == [("entropy/all/mean", 1, 0.5), ("optim/grad_norm", 1, 2.0), ("other", 9, 1.0)]
    assert len(run.written) == 3
    heard.taps.unwrap()
    assert module.log is original


def test_nan_is_a_value_and_missing_is_none(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    run.log({"a": math.nan, "b": None, "c": math.inf, "d": True, "e": "1.0", "f": [1.0], "g": np.float16(0.5)}, step=1)
    assert [row["raw_key"] for row in heard.rows] == ["a", "c", "g"]
    assert math.isnan(heard.rows[0]["value"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (np.int64(3), 3.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.array([0.25]), 0.25),
        (np.array([1.0, 2.0]), None),
        (np.bool_(True), None),
        (torch.tensor(0.1), float(torch.tensor(0.1))),
        (torch.tensor([2.0], requires_grad=True), 2.0),
        (torch.tensor([[7]], dtype=torch.int64), 7.0),
        (torch.tensor(True), None),
        (torch.tensor(1 + 2j), None),
        (torch.ones(2), None),
        (torch.empty((), device="meta"), None),
        (10**400, None),
        (object(), None),
    ],
)
def test_scalars(value: Any, expected: float | None) -> None:
    assert scalar(value) == expected


def test_reading_a_tensor_leaves_no_mark() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen: list[Any] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.tensor(2.0, requires_grad=True)
    state = torch.get_rng_state()
    with Watch():
        assert scalar(x * 1) == 2.0
    assert [str(func) for func in Watch.seen] == ["aten.mul.Tensor"]
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_values_on_a_device_are_skipped_and_counted(heard: Heard, run: WandbRun) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        on_device = torch.empty((), device="cuda")
    add_wandb(heard, run)
    run.log({"loss": on_device, "lr": 0.1}, step=1)
    run.log({"loss": on_device, "lr": 0.1}, step=2)
    assert heard.said == [("lr", 1, 0.1), ("lr", 2, 0.1)]
    heard.taps.unwrap()
    assert heard.taps.n_on_device == 2
    assert heard.events[1:] == [
        "wandb.sdk.wandb_run.Run.log logs loss as a tensor on a device: such values are not recorded",
        "2 values on a device were not recorded",
    ]


def test_a_step_may_be_logged_beside_the_metrics(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    run.log({"loss": 1.0})
    run.log({"loss": 2.0, "train/global_step": 40})
    assert heard.said == [("loss", NO_STEP, 1.0), ("loss", 40, 2.0), ("train/global_step", 40, 40.0)]


def test_a_number_logged_to_two_loggers_in_turn_is_one_record(heard: Heard, run: WandbRun, monkeypatch: Any) -> None:
    class Run:
        def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
            pass

    module = ModuleType("trackio.run")
    vars(module)["Run"] = Run
    add_wandb(heard, run)
    heard.add(module)
    for step in (1, 2):
        for logger in (run, Run()):
            logger.log({"lr": 0.1, "nan": math.nan, "own": float(logger is run)}, step)
    assert [row["source"].split(".")[0] for row in heard.rows if row["raw_key"] == "lr"] == ["wandb", "wandb"]
    assert [row["step"] for row in heard.rows if row["raw_key"] == "nan"] == [1, 2]
    assert [row["value"] for row in heard.rows if row["raw_key"] == "own"] == [1.0, 0.0, 1.0, 0.0]
    Run().log({"lr": 0.1}, 3)  # another step is another number
    assert heard.said[-1] == ("lr", 3, 0.1)
    monkeypatch.setattr("mxprobe.agent.taps.signal_taps.ECHO_NS", 0)
    run.log({"lr": 0.1}, 3)
    assert heard.rows[-1]["source"].startswith("wandb")


def test_a_logger_is_named_after_the_one_framework_in_use(heard: Heard, run: WandbRun, monkeypatch: Any) -> None:
    add_wandb(heard, run)
    run.log({"loss": 1.0})
    monkeypatch.setitem(sys.modules, "skyrl", ModuleType("skyrl"))
    run.log({"loss": 1.0})
    monkeypatch.setitem(sys.modules, "miles", ModuleType("miles"))
    run.log({"loss": 1.0})
    assert [row["framework"] for row in heard.rows] == ["wandb", "skyrl", "wandb"]


def test_a_forked_child_says_nothing(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    vars(heard.taps)["_pid"] = os.getpid() + 1
    run.log({"loss": 1.0})
    assert heard.rows == []
    assert len(run.written) == 1


def test_an_error_that_ends_the_session_ends_the_wrapping(monkeypatch: pytest.MonkeyPatch, run: WandbRun) -> None:
    """The error budget may run out while a tap is being put in: `unwrap` is then called from inside."""
    before = vars(WandbRun)["log"]
    for tap in TAPS:
        monkeypatch.delitem(sys.modules, tap.module, raising=False)
    bad = ModuleType("verl.utils.tracking")
    vars(bad)["Tracking"] = type("Tracking", (), {"log": lambda self, data, step: None})
    standin_sinks.install(monkeypatch, {"verl.utils.tracking": bad, **standin_sinks.wandb(run)})

    def on_event(event: Event) -> None:
        if event.subject.startswith("verl"):
            raise RuntimeError("no room")

    ended: list[BaseException] = []

    def on_error(where: str, error: BaseException) -> None:
        ended.append(error)
        taps.unwrap()

    taps = SignalTaps(lambda rows: None, on_error, on_event)
    taps.ensure_wrapped()
    assert len(ended) == 1
    assert vars(WandbRun)["log"] is before


def test_time_spent_listening_is_accounted_for(heard: Heard, run: WandbRun) -> None:
    add_wandb(heard, run)
    run.log({"loss": 1.0})
    assert heard.taps.take_ns() > 0
    assert heard.taps.take_ns() == 0


def test_no_step_is_not_a_step() -> None:
    assert NO_STEP < 0
