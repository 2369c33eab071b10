"""A process that logs through one real library, tapped in the middle. Prints what was heard as JSON.

    python logger_process.py {accelerate,wandb,tensorboard,trackio,mlflow,swanlab,verl,openrlhf} DIR

Every library gets the same calls: step 1 before the attach, 2 and 3 under it, 4 after the detach.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mxprobe.agent.taps.signal_taps import SignalTaps

OUT = Path(sys.argv[2])
os.environ.update(
    WANDB_MODE="offline",
    WANDB_DIR=str(OUT),
    WANDB_SILENT="true",
    TRACKIO_DIR=str(OUT),
    TENSORBOARD_DIR=str(OUT),
    MLFLOW_TRACKING_URI=OUT.as_uri(),
    MLFLOW_ALLOW_FILE_STORE="true",
    VERL_FILE_LOGGER_ROOT=str(OUT),
)
Log = Callable[[dict[str, Any], int], None]
Tapped = tuple[Any, str]


def wandb() -> tuple[Log, list[Tapped]]:
    import wandb

    wandb.init(project="p")
    return lambda data, step: wandb.log(data, step=step), [(wandb.Run, "log"), (wandb, "log")]


def tensorboard() -> tuple[Log, list[Tapped]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(OUT))

    def log(data: dict[str, Any], step: int) -> None:
        for key, value in data.items():
            writer.add_scalar(key, value, global_step=step)
        writer.flush()

    return log, [(SummaryWriter, "add_scalar")]


def accelerate() -> tuple[Log, list[Tapped]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "trackio"], project_dir=str(OUT))
    accelerator.init_trackers("p")
    return lambda data, step: accelerator.log(data, step=step), [(Accelerator, "log")]


def trackio() -> tuple[Log, list[Tapped]]:
    import trackio

    trackio.init(project="p", embed=False)
    return lambda data, step: trackio.log(data, step), [(trackio.run.Run, "log")]


def mlflow() -> tuple[Log, list[Tapped]]:
    import mlflow

    mlflow.set_experiment("e")
    mlflow.start_run()

    def log(data: dict[str, Any], step: int) -> None:
        first, *rest = data.items()
        mlflow.log_metric(*first, step=step)
        mlflow.log_metrics(dict(rest), step=step)

    return log, [(mlflow, "log_metric"), (mlflow, "log_metrics"), (mlflow.MlflowClient, "log_batch")]


def swanlab() -> tuple[Log, list[Tapped]]:
    import swanlab

    swanlab.init(project="p", mode="offline", logdir=str(OUT))
    return lambda data, step: swanlab.log(data, step=step), [(swanlab.Run, "log")]


def verl() -> tuple[Log, list[Tapped]]:
    """The wheel's own module alone: the package wants Ray and an older transformers."""
    module = _module_of_wheel("verl.utils.tracking")
    tracking = module.Tracking("p", "e", ["wandb", "trackio", "tensorboard", "file"])
    return lambda data, step: tracking.log(data=data, step=step), [(module.Tracking, "log")]


def openrlhf() -> tuple[Log, list[Tapped]]:
    module = _module_of_wheel("openrlhf.utils.logging_utils")
    logger = module.TensorboardLogger(
        SimpleNamespace(logger=SimpleNamespace(tensorboard_dir=str(OUT), wandb=SimpleNamespace(run_name="r")))
    )

    def log(data: dict[str, Any], step: int) -> None:
        logger.log_train(step, data)
        logger.writer.flush()

    return log, [(module.TensorboardLogger, "log_train")]


def _module_of_wheel(name: str) -> ModuleType:
    """Load one module of an unpacked wheel in DIR/wheel; its packages stay empty."""
    (path,) = (OUT / "wheel").rglob(name.replace(".", "/") + ".py")
    for package in (name.split(".")[0], name.rpartition(".")[0]):
        sys.modules[package] = ModuleType(package)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    library = {f.__name__: f for f in (accelerate, wandb, tensorboard, trackio, mlflow, swanlab, verl, openrlhf)}[
        sys.argv[1]
    ]
    log, tapped = library()
    rows: list[dict[str, Any]] = []
    events: list[str] = []
    errors: list[str] = []
    taps = SignalTaps(
        rows.extend,
        lambda where, error: errors.append(f"{where}: {error!r}"),
        lambda event: events.append(event.words),
    )
    before = [vars(owner)[name] for owner, name in tapped]
    log({"reward": 0.125, "entropy": 3.5}, 1)
    taps.ensure_wrapped()
    during = [vars(owner)[name] for owner, name in tapped]
    log({"reward": 0.25, "entropy": float("nan")}, 2)
    log({"reward": 0.1, "entropy": 2.5}, 3)
    taps.unwrap()
    after = [vars(owner)[name] for owner, name in tapped]
    log({"reward": 1.0, "entropy": 1.5}, 4)
    answer = {
        "rows": [[row["framework"], row["source"], row["raw_key"], row["step"], row["value"]] for row in rows],
        "events": events,
        "errors": errors,
        "wrapped": [a is not b for a, b in zip(before, during, strict=True)],
        "restored": [a is b for a, b in zip(before, after, strict=True)],
    }
    (OUT / "heard.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
