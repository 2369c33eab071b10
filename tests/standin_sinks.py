"""Modules with the sinks of frameworks that cannot be installed here, as their sources of autumn 2026 declare them.

Each writes what it is given to `written`, and calls a logger below where the framework does.
"""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Written = list[tuple[dict[str, Any], Any]]


class WandbRun:
    """`wandb.sdk.wandb_run.Run`."""

    def __init__(self) -> None:
        self.written: Written = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.written.append((data, step))


def wandb(run: WandbRun) -> dict[str, ModuleType]:
    """`wandb.log` is bound to the run, as `wandb.init` leaves it."""
    return {"wandb": _module("wandb", log=run.log), "wandb.sdk.wandb_run": _module("wandb.sdk.wandb_run", Run=WandbRun)}


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def verl(run: WandbRun) -> tuple[ModuleType, Any]:
    class Tracking:
        def log(self, data: Any, step: Any, backend: Any = None) -> None:
            run.log(data=data, step=step)

    return _module("verl.utils.tracking", Tracking=Tracking), Tracking()


def openrlhf(run: WandbRun) -> tuple[ModuleType, ModuleType, Any]:
    """Both loggers on: `save_logs_and_checkpoints` hands the same dict to one after the other."""

    class WandbLogger:
        def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
            run.log({f"train/{k}": v for k, v in {**logs_dict, "global_step": global_step}.items()})

        def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None:
            run.log({f"eval/{k}": v for k, v in {**logs_dict, "global_step": global_step}.items()})

    class TensorboardLogger(WandbLogger):
        def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
            super().log_train(global_step, logs_dict)

        def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None:
            super().log_eval(global_step, logs_dict)

    class BasePPOTrainer:
        loggers = (WandbLogger(), TensorboardLogger())

        def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
            for logger in self.loggers:
                logger.log_train(global_step, logs_dict or {})

    loggers = _module("openrlhf.utils.logging_utils", WandbLogger=WandbLogger, TensorboardLogger=TensorboardLogger)
    return loggers, _module("openrlhf.trainer.ppo_trainer", BasePPOTrainer=BasePPOTrainer), BasePPOTrainer()


def nemo_rl() -> tuple[ModuleType, Any]:
    class Logger:
        def log_metrics(
            self,
            metrics: dict[str, Any],
            step: int,
            prefix: str | None = "",
            step_metric: str | None = None,
            step_finished: bool = False,
        ) -> None:
            pass

    return _module("nemo_rl.utils.logger", Logger=Logger), Logger()


def step_keyed(name: str) -> ModuleType:
    """slime and miles: a module function."""

    def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
        pass

    return _module(name, log=log)


def areal() -> tuple[ModuleType, Any]:
    class StatsLogger:
        def __init__(self) -> None:
            self._last_commit_step = -1

        def commit(self, epoch: int, step: int, global_step: int, data: Any) -> None:
            n = 1 if isinstance(data, dict) else len(data)
            self._last_commit_step = max(global_step, self._last_commit_step + 1) + n - 1

    return _module("areal.utils.stats_logger", StatsLogger=StatsLogger), StatsLogger()


def skyrl(name: str) -> tuple[ModuleType, Any]:
    class Tracking:
        def log(self, data: Any, step: int, commit: bool = False) -> None:
            pass

    return _module(name, Tracking=Tracking), Tracking()


def prime_rl(run: WandbRun) -> ModuleType:
    """The function awaits its monitors; while it does, other tasks of the thread log too."""

    async def log(data: Any, step: Any, kind: str = "train", subset: str = "effective") -> None:
        await asyncio.sleep(0)
        if isinstance(data, dict):
            run.log(data, step=step)

    return _module("prime_rl.monitors", log=log)


def prime_rl_of_summer() -> ModuleType:
    def log(metrics: dict[str, Any], step: int) -> None:
        pass

    return _module("prime_rl.monitors", log=log)


def trainer(*, rank: int = 0) -> Any:
    """What `transformers.Trainer.log` reads of a trainer; the class is the stand-in module's."""

    class Trainer:
        def __init__(self) -> None:
            self.state = SimpleNamespace(
                global_step=7, epoch=0.5, num_input_tokens_seen=640, is_world_process_zero=rank == 0
            )
            self.args = SimpleNamespace(include_num_input_tokens_seen="no")

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            pass

    return Trainer()


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module
