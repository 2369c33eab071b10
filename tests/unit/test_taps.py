"""Each framework's sink, with the signature its source has: which keys, which steps, and never twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mxprobe.agent.taps import metric_readers as readers
from mxprobe.agent.taps.signal_taps import NO_STEP, SignalTaps
from mxprobe.agent.taps.tap_table import FRAMEWORK_PACKAGES, FRAMEWORK_TAPS, LOGGER_TAPS, TAPS
from mxprobe.metrics import ALIASES, LOGGERS, resolve
from tests import standin_sinks
from tests.standin_sinks import WandbRun

Said = list[tuple[str, str, int, float]]


class Process:
    """A process that has imported only the given modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (*(tap.module for tap in TAPS), *FRAMEWORK_PACKAGES):
            monkeypatch.delitem(sys.modules, name, raising=False)
        self._monkeypatch = monkeypatch
        self._rows: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.taps = SignalTaps(self._rows.extend, self._fail, lambda event: self.events.append(event.words))
        self.run = WandbRun()

    def _fail(self, where: str, error: BaseException) -> None:
        raise AssertionError(where) from error

    def load(self, *modules: ModuleType) -> None:
        loaded = {module.__name__: module for module in modules} | standin_sinks.wandb(self.run)
        standin_sinks.install(self._monkeypatch, loaded)
        self.taps.ensure_wrapped()
        assert not [event for event in self.events if "not applicable" in event]

    @property
    def said(self) -> Said:
        return [(row["framework"], row["raw_key"], row["step"], row["value"]) for row in self._rows]

    @property
    def sources(self) -> set[str]:
        return {row["source"] for row in self._rows}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    process = Process(monkeypatch)
    yield process
    process.taps.unwrap()


def test_transformers_trainer(process: Process) -> None:
    module = ModuleType("transformers.trainer")
    first, second = standin_sinks.trainer(rank=0), standin_sinks.trainer(rank=1)
    vars(module)["Trainer"] = type(first)
    process.load(module)
    first.log({"loss": 0.5, "note": "text"})
    first.args.include_num_input_tokens_seen = "all"
    first.log(logs={"eval_loss": 0.25}, start_time=None)
    said = {"loss": 0.5, "epoch": 0.5}, {"eval_loss": 0.25, "epoch": 0.5, "num_input_tokens_seen": 640.0}
    assert process.said == [("transformers", key, 7, value) for call in said for key, value in call.items()]
    vars(module)["Trainer"] = type(second)
    assert readers.trainer_log({"self": second, "logs": {"loss": 0.5}}) == []


def test_a_trainer_of_trl_is_called_trl() -> None:
    base = type("Trainer", (), {"__module__": "transformers.trainer"})
    trl = type("GRPOTrainer", (base,), {"__module__": "trl.trainer.grpo_trainer"})
    users = type("MyTrainer", (trl,), {"__module__": "__main__"})
    assert [readers.framework_of(c) for c in (base, trl, users)] == ["transformers", "trl", "trl"]


def test_verl(process: Process) -> None:
    module, tracking = standin_sinks.verl(process.run)
    process.load(module)
    tracking.log(data={"rollout_corr/kl": -0.01, "actor/entropy": 0.4}, step=3)
    assert process.said == [("verl", "rollout_corr/kl", 3, -0.01), ("verl", "actor/entropy", 3, 0.4)]
    assert len(process.run.written) == 1


def test_openrlhf_with_both_loggers_is_one_record(process: Process) -> None:
    loggers, module, trainer = standin_sinks.openrlhf(process.run)
    process.load(loggers, module)
    trainer.save_logs_and_checkpoints(5, {"vllm_kl": 0.02, "generated_samples": ["text"]}, {})
    assert process.said == [("openrlhf", "train/vllm_kl", 5, 0.02)]
    trainer.save_logs_and_checkpoints(6)
    assert len(process.said) == 1
    assert len(process.run.written) == 4


def test_openrlhf_evaluation_and_other_trainers_go_through_the_loggers(process: Process) -> None:
    loggers, module, trainer = standin_sinks.openrlhf(process.run)
    process.load(loggers, module)
    wandb, tensorboard = trainer.loggers
    wandb.log_eval(4, {"reward": 0.5})
    tensorboard.log_eval(4, {"reward": 0.5})
    tensorboard.log_train(4, {"loss": 1.0})
    assert process.said == [("openrlhf", "eval/reward", 4, 0.5), ("openrlhf", "train/loss", 4, 1.0)]


def test_nemo_rl_puts_its_prefix_in_front(process: Process) -> None:
    module, logger = standin_sinks.nemo_rl()
    process.load(module)
    logger.log_metrics({"gen_kl_error": 0.001}, 2, prefix="train")
    logger.log_metrics({"accuracy": 0.5}, 2, "validation")
    logger.log_metrics({"loss": 0.1}, 2)
    logger.log_metrics({"ray/util": 50.0}, 77, step_metric="ray/ray_step")
    assert process.said == [
        ("nemo-rl", "train/gen_kl_error", 2, 0.001),
        ("nemo-rl", "validation/accuracy", 2, 0.5),
        ("nemo-rl", "loss", 2, 0.1),
        ("nemo-rl", "ray/util", NO_STEP, 50.0),
    ]


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("slime.observability.logging_utils", "slime"),
        ("slime.utils.logging_utils", "slime"),
        ("miles.utils.tracking_utils.tracking", "miles"),
    ],
)
def test_slime_and_miles_count_steps_and_rollouts_apart(process: Process, name: str, framework: str) -> None:
    module = standin_sinks.step_keyed(name)
    process.load(module)
    module.log(None, {"train/entropy_loss": 0.4, "train/step": 12}, step_key="train/step")
    module.log(None, {"rollout/raw_reward": 0.7, "rollout/step": 3}, "rollout/step")
    assert process.said == [(framework, "train/entropy_loss", 12, 0.4), (framework, "rollout/raw_reward", 3, 0.7)]
    assert process.sources == {f"{name}.log[train/step]", f"{name}.log[rollout/step]"}


def test_areal_commits_minibatches_at_steps_of_their_own(process: Process) -> None:
    module, logger = standin_sinks.areal()
    process.load(module)
    logger.commit(0, 0, 0, [{"rollout/reward": 0.1, "rollout/reward__count": 8}, {"rollout/reward": 0.2}])
    logger.commit(epoch=0, step=1, global_step=1, data={"rollout/reward": 0.3})
    assert process.said == [
        ("areal", "rollout/reward", 0, 0.1),
        ("areal", "rollout/reward", 1, 0.2),
        ("areal", "rollout/reward", 2, 0.3),
    ]
    assert logger._last_commit_step == 2


@pytest.mark.parametrize("name", ["skyrl.train.utils.tracking", "skyrl_train.utils.tracking"])
def test_skyrl(process: Process, name: str) -> None:
    module, tracking = standin_sinks.skyrl(name)
    process.load(module)
    tracking.log({"policy/policy_entropy": 0.4}, step=1, commit=True)
    assert process.said == [("skyrl", "policy/policy_entropy", 1, 0.4)]


def test_tensorboard_and_mlflow_log_value_by_value(process: Process) -> None:
    writer, client = ModuleType("torch.utils.tensorboard.writer"), ModuleType("mlflow.tracking.client")

    class SummaryWriter:
        def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None, walltime: Any = None) -> None:
            pass

    class MlflowClient:
        def log_metric(self, run_id: str, key: str, value: float, timestamp: Any = None, step: Any = None) -> None:
            pass

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
            pass

    vars(writer)["SummaryWriter"], vars(client)["MlflowClient"] = SummaryWriter, MlflowClient
    process.load(writer, client)
    SummaryWriter().add_scalar("entropy", 0.4, 3)
    SummaryWriter().add_scalar("entropy", 0.3)
    MlflowClient().log_metric("run", "reward", 0.5, step=4)
    entities = [SimpleNamespace(key="loss", value=1.0, step=5), SimpleNamespace(key="loss", value=0.9, step=6)]
    MlflowClient().log_batch("run", metrics=entities)
    MlflowClient().log_batch("run", params=["p"])
    assert process.said == [
        ("tensorboard", "entropy", 3, 0.4),
        ("tensorboard", "entropy", NO_STEP, 0.3),
        ("mlflow", "reward", 4, 0.5),
        ("mlflow", "loss", 5, 1.0),
        ("mlflow", "loss", 6, 0.9),
    ]
    assert resolve("tensorboard", "entropy")


def test_the_table_and_the_aliases_name_the_same_frameworks() -> None:
    assert {tap.framework for tap in FRAMEWORK_TAPS} | {"trl"} == set(ALIASES) - set(LOGGERS)
    assert {tap.framework for tap in LOGGER_TAPS} == set(LOGGERS)
    assert all(tap.is_logger for tap in LOGGER_TAPS)
    assert not any(tap.is_logger for tap in FRAMEWORK_TAPS)
    assert len({tap.source for tap in TAPS}) == len(TAPS)
