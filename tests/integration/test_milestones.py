"""Events of a run's life: checkpoints, loaded states, learning rates, a changed recipe, a planted NaN."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optimizer_hooks

from mxprobe.agent.guard import Guard
from mxprobe.agent.parts.milestones import Milestones
from mxprobe.measuring.recipes import quantize
from tests.standin_controller import agent_thread, controlled, wait_for


def test_a_run_s_life_is_told(tmp_path: Path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    net[0].register_forward_hook(
        lambda m, a, y: F.linear(quantize(a[0], recipe[0]), quantize(m.weight, recipe[0])) + 0.0 * y
    )
    recipe = ["mxfp4+rceil"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    originals = torch.save, torch.load, torch.serialization.save

    def step(x: torch.Tensor | None = None) -> None:
        net(torch.randn(8, 8, 64) if x is None else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with controlled(tmp_path, every=1, whatifs=()) as controller, agent_thread(controller):
        wait_for(lambda: bool(optimizer_hooks._global_optimizer_post_hooks), "the agent does not watch")

        def is_attached() -> bool:
            if not controller.attached.is_set():
                step()
            return controller.attached.is_set()

        def kinds(kind: str) -> list[str]:
            return [row["detail"] for row in controller.rows.get("events", []) if row["kind"] == kind]

        def until(kind: str) -> None:
            """Steps until an event of the kind is told."""
            wait_for(lambda: step() or time.sleep(0.01) or kinds(kind), f"no event {kind}")

        wait_for(is_attached, "not attached")
        until("learning_rate")
        torch.save(net.state_dict(), tmp_path / "model.pt")
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        until("checkpoint_saved")
        net.load_state_dict(torch.load(tmp_path / "model.pt"))
        optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
        until("checkpoint_loaded")
        wait_for(lambda: kinds("resume"), "no event resume")
        n = len(controller.rows.get("outputs", []))
        wait_for(lambda: step() or len(controller.rows.get("outputs", [])) > n + 2, "nothing measured")
        recipe[0] = "mxfp4+floor"
        until("recipe")
        optimizer.param_groups[0]["lr"] = 1e-4
        wait_for(lambda: step() or len(kinds("learning_rate")) > 1, "the learning rate's fall is not told")
        x = torch.randn(8, 8, 64)
        x[0, 0, 0] = float("nan")
        wait_for(lambda: step(x) or time.sleep(0.01) or len(kinds("nonfinite")) > 1, "the NaN is not told")
        controller.send({"verb": "detach"})
        wait_for(lambda: step() or controller.closed.is_set(), "not detached")
    assert kinds("checkpoint_saved") == [f"{tmp_path / 'model.pt'} and 1 more"]
    assert kinds("checkpoint_loaded")[0].startswith(f"{tmp_path / 'model.pt'} and 2 more")  # files, and the weights
    assert kinds("resume") == ["a state was loaded into AdamW"]
    assert kinds("learning_rate") == ["0.001", "0.001 -> 0.0001"]
    assert kinds("recipe") == ["0 train mxfp4+floor: it was mxfp4+rceil before"]
    assert any(detail.startswith("0 x_fwd: ") for detail in kinds("nonfinite"))
    assert kinds("attached")
    assert kinds("detached")
    assert not kinds("error")
    assert (torch.save, torch.load, torch.serialization.save) == originals


@pytest.mark.filterwarnings("ignore")  # the Trainer's own
def test_a_checkpoint_of_the_trainer_is_one_event(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    events: list[tuple[str, str]] = []
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    )
    data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
    errors: list[str] = []
    stones = Milestones(
        Guard(9, lambda where, detail: errors.append(f"{where}: {detail}"), lambda: None),
        lambda event: events.append((event.kind, event.words)),
        lambda: optimizers[-1],
    )
    optimizers: list[Any] = []

    class Attached(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizers.append(kwargs["optimizer"])
            stones.watch([model])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stones.finish()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stones.remove()

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Attached()]).train()
    saved = [detail for kind, detail in events if kind == "checkpoint_saved"]
    assert len(saved) == 2
    assert saved[0].startswith("Trainer at step 2 and ")
    rates = [detail for kind, detail in events if kind == "learning_rate"]
    assert rates[0] == "0.00075"
    assert rates[1] == "0.00075 -> 0.0005"
    assert errors == []


def test_nothing_raises_where_a_reader_fails(tmp_path: Path):
    errors: list[str] = []
    guard = Guard(9, lambda where, detail: errors.append(where), lambda: None)
    stones = Milestones(guard, lambda *_: None, lambda: None)
    stones.watch([])
    transformers = pytest.importorskip("transformers")
    with pytest.raises(AttributeError):
        transformers.Trainer._save_checkpoint(object(), None, None)
    torch.save({}, tmp_path / "a.pt")
    stones.remove()
    assert errors == ["transformers.trainer.Trainer._save_checkpoint"]
