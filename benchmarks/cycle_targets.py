"""Seeded training loops for `attach_cycles.py --target`, which know nothing of mxprobe.

    python benchmarks/cycle_targets.py KIND OUT STEPS PAUSE_S
    torchrun --nproc-per-node=2 benchmarks/cycle_targets.py ddp OUT STEPS PAUSE_S

Each step adds its loss as hex to OUT (of rank R: OUT.R); the last line is a hash of the parameters and of the state of
the random generator. STEPS -1: until OUT.stop is there. Each rank writes its PID to OUT[.R].pid.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64
ASK_EVERY = 10
"""Steps of a distributed job after which rank 0 decides for all whether it is over."""


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how in ("checkpoint", "reentrant"):
            return checkpoint(self._run, x, use_reentrant=self.how == "reentrant")
        return self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


def plain(how: str = "") -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(how), Block(how))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(x, self.weight)
        score, chosen = logits.softmax(-1).topk(2)
        return logits, score, chosen


class Experts(nn.Module):
    """Fused, and called one by one, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 48, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(8, WIDTH, 48) * 0.1)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(8):
            token, slot = torch.where(chosen == expert)
            if len(token):
                hidden = nn.functional.silu(nn.functional.linear(x[token], self.up[expert]))
                out.index_add_(0, token, nn.functional.linear(hidden, self.down[expert]) * score[token, slot, None])
        return out


class MoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.drop = Router(), Experts(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, score, chosen = self.gate(x)
        return x + self.drop(self.experts(x, chosen, score))


class Moe(nn.Module):
    """Half of the blocks under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.first, self.second = nn.Linear(WIDTH, WIDTH), MoeBlock(), MoeBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, self.mix(x), use_reentrant=False))


def torchao() -> nn.Module:
    """Linears that torchao's MXFP4 QAT fake-quantizes."""
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = plain()
    config = MXFakeQuantizeConfig(dtype=torch.float4_e2m1fn_x2)
    quantize_(model, QATConfig(activation_config=config, weight_config=config, step="prepare"))
    assert "MXFakeQuantizedLinear" in {type(module).__name__ for module in model.modules()}
    return model


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(plain())


def fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = plain(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(model)[1:]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "checkpoint": lambda: plain("checkpoint"),
    "reentrant": lambda: plain("reentrant"),
    "loader": plain,
    "moe": Moe,
    "torchao": torchao,
    "ddp": ddp,
    "fsdp2": fsdp2,
}
DISTRIBUTED = ("ddp", "fsdp2")
KINDS = (*MODELS, "grpo")


def batches(kind: str) -> Iterator[torch.Tensor]:
    if kind != "loader":
        while True:
            yield torch.randn(32, WIDTH)
    data = torch.utils.data.TensorDataset(torch.randn(256, WIDTH))
    loader = torch.utils.data.DataLoader(
        data, batch_size=32, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    while True:
        for (x,) in loader:
            yield x


def is_over(step: int, steps: int, stop: Path) -> bool:
    if steps >= 0 or not dist.is_initialized():
        return step == steps or stop.exists()
    if step % ASK_EVERY:
        return False
    asked = torch.tensor(float(stop.exists()))
    dist.broadcast(asked, 0)
    return bool(asked.item())


def local(parameter: Any) -> torch.Tensor:
    own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own.detach().contiguous()


def state_of(model: nn.Module) -> str:
    bits = b"".join(local(p).numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
    return "end " + hashlib.sha256(bits).hexdigest()


def train(kind: str, out: Path, steps: int, pause_s: float, stop: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    with open(out, "w", buffering=1) as losses:
        for x in batches(kind):
            if is_over(step, steps, stop):
                break
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.write(loss.item().hex() + "\n")
            step += 1
            time.sleep(pause_s)
        losses.write(state_of(model) + "\n")


def grpo(out: Path, steps: int, pause_s: float, stop: Path) -> None:
    """TRL's trainer on a small Qwen: generation, rewards and training in one process."""
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    from mxprobe.demo import job

    losses = open(out, "w", buffering=1)  # noqa: SIM115 - until the end of the process

    class Write(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.write(f"{float(logs['loss']).hex()} {float(logs['reward']).hex()}\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(pause_s)
            control.should_training_stop = state.global_step == steps or stop.exists()

    transformers.set_seed(0)
    model = job.build_model(layers=1, hidden=32)
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=4,
            max_steps=100_000,
            logging_steps=1,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=job.copy_reward,
            args=config,
            train_dataset=job.build_dataset(0),
            processing_class=job.build_tokenizer(),
            callbacks=[Write()],
        )
        trainer.train()
    losses.write(state_of(model) + "\n")


def main() -> None:
    kind, out, steps, pause_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    stop = Path(f"{out}.stop")
    torch.set_num_threads(1)
    if kind in DISTRIBUTED:
        dist.init_process_group("gloo")
        out = Path(f"{out}.{dist.get_rank()}")
    Path(f"{out}.pid").write_text(str(os.getpid()))
    if kind == "grpo":
        grpo(out, steps, pause_s, stop)
    else:
        train(kind, out, steps, pause_s, stop)
    if kind in DISTRIBUTED:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
