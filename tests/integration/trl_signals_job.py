"""A GRPO run that reports to wandb, TensorBoard and trackio at once, tapped from its third step to its eighth.

    python trl_signals_job.py DIR        writes DIR/rows.json: what was heard, and whether everything is as before

The attach comes when the loggers are long initialised, as it does in life.
"""

import json
import os
import sys
from pathlib import Path

OUT = Path(sys.argv[1])
os.environ.update(
    WANDB_MODE="offline",
    WANDB_DIR=str(OUT),
    WANDB_SILENT="true",
    TRACKIO_DIR=str(OUT / "trackio"),
    TENSORBOARD_LOGGING_DIR=str(OUT / "tensorboard"),
)
FIRST, LAST, STEPS = 3, 8, 10

import torch  # noqa: E402
import trackio.run  # noqa: E402
import transformers  # noqa: E402
import wandb  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from mxprobe.agent.taps.signal_taps import SignalTaps  # noqa: E402
from mxprobe.demo import job  # noqa: E402

SINKS = {
    "trainer": (transformers.Trainer, "log"),
    "wandb": (wandb.Run, "log"),
    "tensorboard": (SummaryWriter, "add_scalar"),
    "trackio": (trackio.run.Run, "log"),
}


def functions() -> dict[str, object]:
    return {name: vars(owner)[function] for name, (owner, function) in SINKS.items()} | {"wandb.log": wandb.log}


class Attached(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.events: list[str] = []
        self.errors: list[str] = []
        self.taps = SignalTaps(
            self.rows.extend,
            lambda where, error: self.errors.append(f"{where}: {error!r}"),
            lambda event: self.events.append(event.words),
        )
        self.before: dict[str, object] = {}
        self.during: dict[str, object] = {}
        self.after: dict[str, object] = {}

    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step == FIRST:
            self.before = functions()
            self.taps.ensure_wrapped()
            self.during = functions()
        if state.global_step == LAST + 1:
            self.taps.unwrap()
            self.after = functions()


def main() -> None:
    torch.set_num_threads(1)
    transformers.set_seed(0)
    attached = Attached()
    data = job.build_dataset(0)
    trainer = GRPOTrainer(
        model=job.build_model(layers=1, hidden=32),
        reward_funcs=job.copy_reward,
        args=GRPOConfig(
            output_dir=str(OUT),
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            num_generations=4,
            max_completion_length=4,
            max_steps=STEPS,
            eval_strategy="steps",
            eval_steps=4,
            logging_steps=1,
            report_to=["wandb", "tensorboard", "trackio"],
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=job.build_tokenizer(),
        callbacks=[attached],
    )
    trainer.train()
    result = {
        "rows": attached.rows,
        "events": attached.events,
        "errors": attached.errors,
        "wrapped": {name: attached.during[name] is not f for name, f in attached.before.items()},
        "restored": {name: attached.after[name] is f for name, f in attached.before.items()},
    }
    wandb.finish()
    (OUT / "rows.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
