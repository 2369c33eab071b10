"""Readers of metrics: which numbers a call to a sink reports, at which step. One function a shape of call.

A reader gets the call's arguments by name (`self` included) and gives one `Reading` per step it reports. It may
raise: the call then counts as not understood, and the sinks below it are listened to instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from mxprobe.agent.taps.scalars import integer


@dataclass(frozen=True)
class Reading:
    data: Mapping[Any, Any]
    """Keys as the framework's own files have them -> values of any type."""
    step: int | None
    """The framework's step; None where the call has none."""
    counter: str = ""
    """Which of the sink's step counters, where it has several."""
    framework: str = ""
    """Set where the caller is more telling than the sink."""


Arguments = Mapping[str, Any]
Reader = Callable[[Arguments], "list[Reading]"]

# What users of a sink without a step argument log beside their metrics.
_STEP_KEYS = ("train/global_step", "trainer/global_step", "global_step", "_step")


def named(data: str) -> Reader:
    """Return the reader of a function with a mapping argument of this name and an argument `step`."""

    def read(arguments: Arguments) -> list[Reading]:
        return [Reading(_mapping(arguments[data]), integer(arguments.get("step")))]

    return read


def logged(data: str) -> Reader:
    """Read as `named` does; without a step, take the one that is logged beside the metrics, if there is one.

    A logger's own count of calls is no step: a trainer may log ten times in one step, or every tenth step.
    """

    def read(arguments: Arguments) -> list[Reading]:
        metrics = _mapping(arguments[data])
        steps = (integer(step) for step in (arguments.get("step"), *(metrics.get(key) for key in _STEP_KEYS)))
        return [Reading(metrics, next((step for step in steps if step is not None), None))]

    return read


def prefixed(prefix: str, data: str, step: str) -> Reader:
    """Read as `named` does, for sinks that put `prefix` in front of each key further down."""

    def read(arguments: Arguments) -> list[Reading]:
        metrics = {f"{prefix}{key}": value for key, value in _mapping(arguments.get(data) or {}).items()}
        return [Reading(metrics, integer(arguments[step]))]

    return read


def trainer_log(arguments: Arguments) -> list[Reading]:
    """Read `transformers.Trainer.log`: every rank calls it, rank 0 reports; it adds the epoch and the tokens itself."""
    trainer = arguments["self"]
    state = trainer.state
    if not state.is_world_process_zero:
        return []
    logs = dict(_mapping(arguments["logs"]))
    if state.epoch is not None:
        logs["epoch"] = state.epoch
    if getattr(trainer.args, "include_num_input_tokens_seen", "no") not in ("no", False):
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
    return [Reading(logs, integer(state.global_step), framework=framework_of(type(trainer)))]


def framework_of(trainer_class: type) -> str:
    """Return `trl` where a class of the trainer's ancestry lives there, else `transformers`."""
    return "trl" if any(c.__module__.split(".")[0] == "trl" for c in trainer_class.__mro__) else "transformers"


def accelerator(arguments: Arguments) -> list[Reading]:
    """Read `Accelerator.log`: every rank calls it, the main one hands it to the trackers."""
    return logged("values")(arguments) if arguments["self"].is_main_process else []


def nemo_rl(arguments: Arguments) -> list[Reading]:
    """Read `Logger.log_metrics`: the prefix is part of the key; with a step metric, the step is another clock's."""
    prefix = arguments.get("prefix") or ""
    metrics = _mapping(arguments["metrics"])
    data = {f"{prefix}/{key}" if prefix else key: value for key, value in metrics.items()}
    counter = arguments.get("step_metric") or ""
    return [Reading(data, None if counter else integer(arguments["step"]), counter)]


def step_keyed(arguments: Arguments) -> list[Reading]:
    """Read the sink of slime and miles: `step_key` names the entry with the step, e.g. `train/step`."""
    metrics, key = _mapping(arguments["metrics"]), str(arguments["step_key"])
    return [Reading({k: v for k, v in metrics.items() if k != key}, integer(metrics.get(key)), key)]


def areal(arguments: Arguments) -> list[Reading]:
    """Read `StatsLogger.commit`: one mapping per minibatch, at consecutive steps that never go back."""
    data = arguments["data"]
    items = [data] if isinstance(data, Mapping) else list(data)
    last = integer(vars(arguments["self"]).get("_last_commit_step"))
    first = max(int(arguments["global_step"]), (-1 if last is None else last) + 1)
    return [
        Reading({k: v for k, v in _mapping(item).items() if not str(k).endswith("__count")}, first + i)
        for i, item in enumerate(items)
    ]


def prime_rl(arguments: Arguments) -> list[Reading]:
    """Read `monitors.log`, which also takes episodes, which hold text: those are not metrics."""
    data = arguments["data"]
    return [Reading(data, integer(arguments["step"]))] if isinstance(data, Mapping) else []


def one_value(key: str, value: str, step: str) -> Reader:
    """Return the reader of a function that logs a single number."""

    def read(arguments: Arguments) -> list[Reading]:
        return [Reading({arguments[key]: arguments[value]}, integer(arguments.get(step)))]

    return read


def mlflow_batch(arguments: Arguments) -> list[Reading]:
    """Read `MlflowClient.log_batch`: entities with key, value and step."""
    by_step: dict[int | None, dict[Any, Any]] = {}
    for metric in arguments.get("metrics", ()):
        by_step.setdefault(integer(metric.step), {})[metric.key] = metric.value
    return [Reading(data, step) for step, data in by_step.items()]


def _mapping(data: Any) -> Mapping[Any, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"a {type(data).__name__} where a mapping of metrics was expected")
    return data
