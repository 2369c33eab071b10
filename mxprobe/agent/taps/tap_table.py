"""Every sink of metrics that is tapped: where it is, the parameters its reader needs, how a call is read.

Versions looked at: transformers 5.24, verl 0.9.1, OpenRLHF 0.11.2, NeMo-RL, slime, miles and prime-rl of autumn 2026,
AReaL 1.0.4, SkyRL 0.3, accelerate 1.15, wandb 0.31, TensorBoard of torch 2.13, trackio 0.43, MLflow 3.17, swanlab
0.10. A call that goes through several of them is recorded by the outermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from mxprobe.agent.taps import metric_readers as readers


@dataclass(frozen=True)
class Tap:
    module: str
    owner: str
    """Class that defines the function; empty where it is the module's own."""
    function: str
    parameters: tuple[str, ...]
    """Names that the function must take; `self` of a method is implied."""
    read: Callable[[Mapping[str, Any]], Any]
    """A call's arguments by name -> what it says: `list[Reading]`, or a `Batch` of `taps.batch_readers`."""
    framework: str
    """The framework whose keys these are; the logger's own name where `is_logger`."""
    is_logger: bool = False
    """Carries anybody's keys."""
    also: tuple[tuple[str, str], ...] = ()
    """(module, name) of globals that may hold the same function, or a method bound to it."""

    @property
    def source(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.function) if part)

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


_DATA_STEP = readers.named("data")
_OPENRLHF = ("global_step", "logs_dict")


def _logger(module: str, owner: str, function: str, read: readers.Reader, *parameters: str, package: str = "") -> Tap:
    """Return the tap of a logger, which is told by its package; `package` may hold the same function."""
    also = ((package, function),) if package else ()
    return Tap(module, owner, function, parameters, read, package or module.partition(".")[0], True, also)


FRAMEWORK_TAPS: tuple[Tap, ...] = (
    Tap("transformers.trainer", "Trainer", "log", ("logs",), readers.trainer_log, "transformers"),
    Tap("verl.utils.tracking", "Tracking", "log", ("data", "step"), _DATA_STEP, "verl"),
    Tap(
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer",
        "save_logs_and_checkpoints",  # called without any logger too, and once where both loggers are on
        _OPENRLHF,
        readers.prefixed("train/", "logs_dict", "global_step"),
        "openrlhf",
    ),
    *(
        Tap("openrlhf.utils.logging_utils", logger, f"log_{phase}", _OPENRLHF, read, "openrlhf")
        for logger in ("WandbLogger", "TensorboardLogger")
        for phase in ("train", "eval")
        for read in (readers.prefixed(f"{phase}/", "logs_dict", "global_step"),)
    ),
    Tap("nemo_rl.utils.logger", "Logger", "log_metrics", ("metrics", "step", "prefix"), readers.nemo_rl, "nemo-rl"),
    *(
        Tap(f"{framework}.{module}", "", "log", ("metrics", "step_key"), readers.step_keyed, framework)
        for framework, module in (
            ("slime", "observability.logging_utils"),
            ("slime", "utils.logging_utils"),
            ("miles", "utils.tracking_utils.tracking"),
        )
    ),
    Tap("areal.utils.stats_logger", "StatsLogger", "commit", ("global_step", "data"), readers.areal, "areal"),
    Tap("skyrl.train.utils.tracking", "Tracking", "log", ("data", "step"), _DATA_STEP, "skyrl"),
    Tap("skyrl_train.utils.tracking", "Tracking", "log", ("data", "step"), _DATA_STEP, "skyrl"),
    Tap("prime_rl.monitors", "", "log", ("data", "step"), readers.prime_rl, "prime-rl"),
)

_SCALAR = readers.one_value("tag", "scalar_value", "global_step")
_METRIC = readers.one_value("key", "value", "step")
_METRICS = readers.logged("metrics")

LOGGER_TAPS: tuple[Tap, ...] = (
    _logger("accelerate.accelerator", "Accelerator", "log", readers.accelerator, "values", "step"),
    _logger("wandb.sdk.wandb_run", "Run", "log", readers.logged("data"), "data", "step", package="wandb"),
    *(
        Tap(module, "SummaryWriter", "add_scalar", ("tag", "scalar_value", "global_step"), _SCALAR, "tensorboard", True)
        for module in ("torch.utils.tensorboard.writer", "tensorboardX.writer")
    ),
    _logger("trackio.run", "Run", "log", _METRICS, "metrics", "step"),
    # The functions of the module turn a missing step into 0 before they call the client.
    _logger("mlflow.tracking.fluent", "", "log_metric", _METRIC, "key", "value", "step", package="mlflow"),
    _logger("mlflow.tracking.fluent", "", "log_metrics", _METRICS, "metrics", "step", package="mlflow"),
    _logger("mlflow.tracking.client", "MlflowClient", "log_metric", _METRIC, "key", "value", "step"),
    _logger("mlflow.tracking.client", "MlflowClient", "log_batch", readers.mlflow_batch, "metrics"),
    _logger("swanlab.sdk.internal.run", "Run", "log", readers.logged("data"), "data", "step"),
    _logger("swanlab.data.run.main", "SwanLabRun", "log", readers.logged("data"), "data", "step"),
)

TAPS: tuple[Tap, ...] = FRAMEWORK_TAPS + LOGGER_TAPS

FRAMEWORK_PACKAGES = {tap.package: tap.framework for tap in FRAMEWORK_TAPS if tap.framework != "transformers"}
"""Package -> framework, for calls that reach a logger on another way than through the framework's own sink."""
