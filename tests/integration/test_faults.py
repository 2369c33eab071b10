"""A fault in any callable of the agent: the run keeps its bits, the agent leaves nothing behind, and says what failed.

Every function of `mxprobe.agent` and `mxprobe.measuring` is found by walking over their modules. A fault is planted by
putting a function that raises in its place. A few are planted by default and those of `PLANTED` in the slow tests.
`MXPROBE_FAULTS=all` plants one in each function there is, in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode

import mxprobe.agent
import mxprobe.measuring
from mxprobe.agent.probes import module_probe as hooks
from tests.fault_runs import CONFIG, KINDS, codes_entered, is_shipped, with_a_sink
from tests.standin_controller import StandinController, controlled
from tests.watched_run import SINK, errors_told, fingerprint_alone, step_until_it_has_left, what_is_left

# What torch, the interpreter or a wrapped function of the user's calls directly, and what their `except` clauses call:
# they hold the guards. To replace one is to replace what is to be tested.
GUARDS = {
    "agent.boot._Agent._at_exit",
    "agent.boot.start",
    "agent.event_log.EventLog.tell",
    "agent.guard.Guard.attempt",
    "agent.guard.Guard.hook",
    "agent.guard.Guard.is_forked",
    "agent.guard.Guard.swallow",
    "agent.parts.batches.BatchTaps._listen",
    "agent.parts.milestones.Milestones._listen",
    "agent.parts.sync.WeightSync._on_load",
    "agent.probes.experts_probe.ExpertsProbe._after",
    "agent.roots.RootWatch._enter",
    "agent.roots.RootWatch._leave",
    "agent.taps.signal_taps.SignalTaps._listen",
    "agent.taps.splicing.Splice._hear",
    "agent.taps.tap_table.Tap.source",
    "measuring.interruptions.is_of_a_signal_handler",
}
# What takes hooks, functions and threads out. Without one of these something inert stays; the bits do not change.
WAYS_OUT = {
    "agent.boot._Agent._leave",
    "agent.probes.forward_hooks.ForwardHooks.remove",
    "agent.probes.module_probe.ModuleProbe._disarm",
    "agent.probes.module_probe.ModuleProbe.remove",
    "agent.listening.Listening.abandon",
    "agent.parts.milestones.Milestones.remove",
    "agent.probes.experts_probe.ExpertsProbe._disarm",
    "agent.probes.experts_probe.ExpertsProbe._leave",
    "agent.probes.gemm_watch.GemmWatch.is_elsewhere",
    "agent.probes.gemm_watch.GemmWatch.leave",
    "agent.parts.norm_layers.Norms.remove",
    "agent.phases.Phases._disarm",
    "agent.phases.Phases.remove",
    "agent.roots.RootWatch.close",
    "agent.session.Session._take_out",
    "agent.session.Session.abandon",
    "agent.session.Session.close",
    "agent.taps.signal_taps.SignalTaps.unwrap",
    "agent.taps.splicing.Splice._give_back",
    "agent.taps.splicing.Splice.remove",
    "agent.taps.splicing.Splices._is_back",
    "agent.taps.splicing.Splices.give_back",
    "agent.parts.batches.BatchTaps.remove",
    "agent.transport.Transport.close",
    "agent.worker.Worker.stop",
    "measuring.compat.take_off_function_mode",
}


def agent_modules() -> dict[str, ModuleType]:
    """Name below `mxprobe` -> module, of all that runs inside the user's process."""
    found: dict[str, ModuleType] = {}
    for package in (mxprobe.agent, mxprobe.measuring):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found[info.name.removeprefix("mxprobe.")] = importlib.import_module(info.name)
    return found


def callables() -> dict[str, tuple[Any, str]]:
    """`module.function` or `module.Class.method` -> (its owner, its name), of every function written there."""
    found: dict[str, tuple[Any, str]] = {}
    for short, module in agent_modules().items():
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if isinstance(value, FunctionType):
                found[f"{short}.{name}"] = (module, name)
            elif isinstance(value, type):
                for method, raw in vars(value).items():
                    if _is_written_here(raw) and (not method.startswith("__") or method == "__init__"):
                        found[f"{short}.{name}.{method}"] = (value, method)
    return found


def _is_written_here(raw: Any) -> bool:
    """False for what `dataclass` and its like have made."""
    function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
    return isinstance(function, FunctionType) and is_shipped(function.__code__)


class Fault:
    """Stands in a function's place, raises at every call, and counts them."""

    def __init__(self, error: BaseException) -> None:
        self.n_calls = 0
        self._error = error

    def raised(self, *_args: Any, **_options: Any) -> Any:
        self.n_calls += 1
        raise self._error.with_traceback(None)


def plant(patch: pytest.MonkeyPatch, name: str, error: BaseException) -> Fault:
    owner, attribute = callables()[name]
    fault, raw = Fault(error), vars(owner)[attribute]
    if isinstance(raw, property):
        patch.setattr(owner, attribute, property(fault.raised))
    elif isinstance(owner, type):
        patch.setattr(owner, attribute, lambda *args, **options: fault.raised(*args, **options))
    else:
        for module in agent_modules().values():  # `from ... import` has copied the name
            for each in [each for each, value in vars(module).items() if value is raw]:
                patch.setattr(module, each, fault.raised)
    return fault


@pytest.fixture(autouse=True)
def sink(monkeypatch: pytest.MonkeyPatch) -> None:
    with_a_sink(monkeypatch)


def run_with(
    name: str, error: BaseException, directory: Path, kind: str = "dense"
) -> tuple[Fault | None, StandinController]:
    """A run of that kind with the fault, or without one for "": its bits, and what is left, are checked here."""
    how, fault = KINDS[kind], None
    with pytest.MonkeyPatch.context() as outer:
        how.prepare(outer)
        watched = how.make()
        with pytest.MonkeyPatch.context() as patch, controlled(directory, **{**CONFIG, **how.config}) as controller:
            if name:
                fault = plant(patch, name, error)
            step_until_it_has_left(watched, controller, *how.asks)
        if how.keeps_bits:
            left = {} if name in WAYS_OUT else what_is_left(watched.model)
            assert left == {}, f"left: {left}"
            assert watched.fingerprint() == fingerprint_alone(len(watched.losses), how.make), "other bits"
    return fault, controller


def ended(controller: StandinController) -> str:
    return next((str(frame["reason"]) for frame in controller.frames if frame["verb"] in ("detached", "failed")), "")


def test_without_a_fault(tmp_path: Path) -> None:
    """What the other tests of this file rely on: the run exercises the agent, which has nothing to complain of."""
    _, controller = run_with("", RuntimeError(), tmp_path)
    assert (ended(controller), errors_told(controller)) == ("asked", [])
    assert {"tensors", "outputs", "gradients", "sensitivity", "replays", "flight", "signals"} <= set(controller.rows)
    assert "checkpoint_saved" in {row["kind"] for row in controller.rows["events"]}


# name -> (what it raises, how the attach ends, the place that the first error is told of)
PLANTED: dict[str, tuple[BaseException, str, str]] = {
    "agent.probes.module_probe.ModuleProbe._on_call": (
        RuntimeError("planted"),
        "error_budget",
        "forward hook of block.up",
    ),
    "measuring.operands.weights.sample_weight": (MemoryError(), "error_budget", "forward hook of block.up"),
    "measuring.operands.snapshot.Snapshot.add_gradient": (
        torch.OutOfMemoryError("planted"),
        "error_budget",
        "gradient hook of lm_head",
    ),
    "agent.parts.flight.NormTaps._take": (TypeError("planted"), "error_budget", "flight recorder at embed"),
    "agent.parts.norm_layers.Norms._on_call": (RuntimeError("planted"), "error_budget", "weights of block.norm"),
    "agent.probes.module_probe.ModuleProbe.arm": (RuntimeError("planted"), "error_budget", "probed modules"),
    "agent.phases.Phases._begin_forward": (RuntimeError("planted"), "error_budget", "phases"),
    "agent.parts.milestones.Milestones._note": (RuntimeError("planted"), "asked", "torch.serialization.save"),
    "agent.taps.signal_taps.SignalTaps._rows": (ValueError("planted"), "error_budget", f"{SINK}.Tracking.log"),
    "measuring.replay.captured_call.capture": (RuntimeError("planted"), "asked", "capturing a call"),
    "measuring.replay.sensitivity.measure_sensitivity": (MemoryError(), "asked", "replaying a call"),
    "agent.session.Session._end_step": (KeyError("planted"), "error_budget", "optimizer step"),
    "agent.session.Session._install": (AttributeError("planted"), "error_budget", "optimizer step"),
    "agent.parts.probed_modules.ProbedModules._measure": (RuntimeError("planted"), "error_budget", "measuring"),
    "measuring.step_rows.measure_step": (MemoryError(), "error_budget", "measuring"),
    "measuring.flight_memory.BlackBox.add": (ZeroDivisionError("planted"), "error_budget", "measuring"),
    "agent.recorder.Recorder.flush": (MemoryError(), "error_budget", ""),
    "agent.transport.Transport.batch": (MemoryError(), "error_budget", ""),
    "agent.transport.Transport._send_all": (RuntimeError("planted"), "", ""),
    "agent.worker.Worker._next_job": (MemoryError(), "worker_died", ""),
    "agent.worker.Worker.start": (RuntimeError("can't start new thread"), "load_failed", ""),
    "agent.session.Session.tick": (RuntimeError("planted"), "agent_failed", ""),
    "agent.roots._silence": (RuntimeError("planted"), "load_failed", ""),
    "measuring.replay.sharded.is_sharded": (RuntimeError("planted"), "asked", "replays"),
}
BY_DEFAULT = (
    "agent.probes.module_probe.ModuleProbe._on_call",
    "measuring.operands.snapshot.Snapshot.add_gradient",
    "agent.parts.probed_modules.ProbedModules._measure",
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the threads that have died
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in PLANTED]
)
def test_a_fault_is_told_of_and_harms_nobody(name: str, tmp_path: Path) -> None:
    error, reason, place = PLANTED[name]
    fault, controller = run_with(name, error, tmp_path)
    assert fault is not None
    assert fault.n_calls > 0
    assert ended(controller) == reason
    told = errors_told(controller)
    assert len(told) == len(set(told)), "told more than once"
    if place:
        assert f"{place}: {type(error).__name__}: {error}" in told
    if reason == "error_budget":
        assert controller.frame("detached")["n_errors"] > CONFIG["error_budget"]


@pytest.mark.slow
def test_a_model_that_cannot_be_looked_at_is_not_served(tmp_path: Path) -> None:
    _, controller = run_with("agent.roots.holds_a_gemm", RuntimeError("planted"), tmp_path, "engine")
    assert controller.frame("failed")["reason"] == "no_model"
    assert errors_told(controller) == ["looking at a model that serves: RuntimeError: planted"]


@pytest.fixture
def no_mode_stays() -> Iterator[None]:
    """What a fault in a way out leaves on must not meet the tests that follow."""
    yield
    while _get_current_function_mode_stack():
        _pop_mode()


@pytest.mark.usefixtures("no_mode_stays")
@pytest.mark.parametrize(
    "name",
    [
        "agent.probes.gemm_watch.GemmWatch.enter",
        "measuring.adapters.fused_experts._first_tensor",
        "agent.probes.gemm_watch.GemmWatch.leave",
    ],
)
def test_a_probe_that_takes_itself_off_in_a_call_has_others_on_the_module(name: str, tmp_path: Path) -> None:
    """torch goes on to call the other's hooks, which have been taken out, with other arguments."""
    fault, controller = run_with(name, RuntimeError("planted"), tmp_path, "experts")
    assert fault is not None
    assert fault.n_calls > 0
    assert ended(controller) == "error_budget"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("agent.parts.recipe_switch.Recipes._answer", "asked"), ("agent.listening.Listening._on_event", "logger")],
)
def test_nothing_is_put_in_by_an_agent_that_fails_as_it_comes_or_goes(name: str, kind: str, tmp_path: Path) -> None:
    fault, _ = run_with(name, RuntimeError("planted"), tmp_path, kind)
    assert fault is not None
    assert fault.n_calls > 0


def test_words_that_fail_are_not_needed(tmp_path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    _, controller = run_with("agent.probes.module_probe.ModuleProbe._on_call", MuteError(), tmp_path)
    assert errors_told(controller)[0] == "forward hook of block.up: MuteError, whose own words failed"


def test_the_guards_exist() -> None:
    assert set(callables()) >= GUARDS | WAYS_OUT | set(PLANTED)
    assert callables()["agent.probes.module_probe.ModuleProbe._on_forward"][0] is hooks.ModuleProbe


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MXPROBE_FAULTS") != "all", reason="half an hour and more; MXPROBE_FAULTS=all")
def test_a_fault_in_every_function(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=7200, check=False)
    print(done.stdout)
    assert [line for line in done.stdout.splitlines() if line.startswith("FAILED")] == []
    assert done.returncode == 0


def kinds_that_call(directory: Path) -> dict[str, str]:
    """Function -> the first kind of run that calls it; none where none does."""
    codes = {code_of(name): name for name in callables()}
    found: dict[str, str] = {}
    for kind in KINDS:
        for name in in_fork(directory / kind, lambda at, kind=kind: names_called(codes, kind, at)):
            if name in codes.values():
                found.setdefault(name, kind)
            else:
                print(f"FAILED without a fault, {kind}: {name}")
    return found


def code_of(name: str) -> CodeType:
    owner, attribute = callables()[name]
    raw = vars(owner)[attribute]
    function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
    return unwrap(function).__code__


def names_called(codes: dict[CodeType, str], kind: str, directory: Path) -> list[str]:
    entered = codes_entered(lambda: run_with("", RuntimeError(), directory, kind))
    return [codes[code] for code in entered if code in codes]


def fault_in(name: str, kind: str, directory: Path) -> list[str]:
    fault, controller = run_with(name, RuntimeError("planted"), directory, kind)
    assert fault is not None
    return [f"{name}: {fault.n_calls} calls, {kind}, ended {ended(controller) or 'without a word'}"]


def in_fork(directory: Path, act: Callable[[Path], list[str]]) -> list[str]:
    """Lines told by `act` in a fork of this process, which has imported everything and run nothing."""
    directory.mkdir()
    told = directory / "told"
    child = os.fork()
    if not child:
        try:
            lines = act(directory)
        except BaseException as error:
            lines = [f"{type(error).__name__}: {error}".replace("\n", " ")]
        try:
            told.write_text("\n".join(lines))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return told.read_text().splitlines() if told.exists() else ["died"]


def plant_everywhere(directory: Path, *parts: str) -> None:
    """A fault in each function of which the name has one of the parts."""
    kinds = kinds_that_call(directory)
    names = [name for name in callables() if any(part in name for part in parts or ("",))]
    for name in names:
        if name not in kinds:
            print(f"NOT CALLED {name}")
        elif name not in GUARDS:
            lines = in_fork(directory / name, lambda at, name=name: fault_in(name, kinds[name], at))
            is_told = lines[0].startswith(f"{name}: ")
            print(lines[0] if is_told else f"FAILED {name}, {kinds[name]}: {lines[0]}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plant_everywhere(Path(sys.argv[1]), *sys.argv[2:])
