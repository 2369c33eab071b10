"""One rank of a model computed in parallel on gloo, or the whole of it in one process, with the agent inside.

    python -m tests.integration.parallel_ranks RANK WORLD DIRECTORY PLAN...

Weights and tokens are the same in every plan and never change (learning rate 0), float64, so that each probed step
gives the same rows and nothing hangs on the order of a sum. DIRECTORY/PLAN.RANK gets the last probed step's as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests import standin_modules as megatron
from tests.integration.parallel_models import (
    FFN,
    FUSED_WIDTH,
    HIDDEN,
    TOKENS,
    Experts,
    FusedModel,
    Model,
    values,
)
from tests.standin_controller import StandinController, agent_thread, controlled, wait_for

ROLES = 6


def tokens(part: int = 0, of: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, weights of the loss) [1, TOKENS / of, HIDDEN]: the loss is their product with the output, summed."""
    n = TOKENS // of
    return values(1, TOKENS, HIDDEN)[None, part * n : (part + 1) * n], values(2, TOKENS, HIDDEN)[
        None, part * n : (part + 1) * n
    ]


class Plan:
    """A model and one training step of it."""

    def __init__(self) -> None:
        self.model: nn.Module = Model()
        self.x, self.c = tokens()

    def step(self) -> None:
        (self.model(self.x) * self.c).sum().backward()


class DataParallel(Plan):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.parallel.DistributedDataParallel(self.model)
        self.x, self.c = tokens(dist.get_rank(), dist.get_world_size())


class TensorParallel(Plan):
    """Two ranks a model, two models, each sharded once more by FSDP2 over the two."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(self.model, mesh["tp"], plan)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.x, self.c = tokens(mesh["dp"].get_local_rank(), 2)


class SequenceParallel(Plan):
    """Four ranks a model, tokens sharded between the blocks' GEMMs."""

    def __init__(self) -> None:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            PrepareModuleOutput,
            RowwiseParallel,
            parallelize_module,
        )
        from torch.distributed.tensor.parallel import SequenceParallel as Norm

        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(
            self.model,
            mesh,
            {
                "": PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
                ),
                "layers.*.norm": Norm(),
                "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
                "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        parallelize_module(
            self.model, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        )


class _Gather(torch.autograd.Function):
    """All tokens of all ranks; backward, the sum over ranks of this rank's (`summed`) or just its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, summed: bool) -> torch.Tensor:
        ctx.dim, ctx.summed = dim, summed
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        if ctx.summed:
            dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None, None


class _Reduce(torch.autograd.Function):
    """The sum over ranks, of which each keeps its tokens; backward, all tokens' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 0)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grads[0].contiguous())
        return torch.cat(parts, 0)


class Column(megatron.ColumnParallelLinear):
    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return _Gather.apply(x, dim, dim == 0)  # type: ignore[no-any-return, no-untyped-call]


class Row(megatron.RowParallelLinear):
    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        return _Reduce.apply(y)  # type: ignore[no-any-return, no-untyped-call]


class Megatron(Plan):
    """Stand-ins of Megatron's layers with sequence parallelism, tokens along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        rank, n, whole = dist.get_rank(), dist.get_world_size(), Model()
        for layer in whole.layers:
            how = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "bias": False}
            up, down = Column(HIDDEN, FFN, **how), Row(FFN, HIDDEN, **how)
            with torch.no_grad():
                up.weight = nn.Parameter(layer.up.weight.chunk(n, 0)[rank].clone())
                down.weight = nn.Parameter(layer.down.weight.chunk(n, 1)[rank].clone())
            layer.up, layer.down = _Only(up), _Only(down)
        self.model = whole
        x, c = tokens(rank, n)
        self.x, self.c = x[0], c[0]


class _Only(nn.Module):
    """A layer that returns (output, bias), where a model expects the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


class Pipeline(Plan):
    """Two stages, two models; each stage's model calls its only layer `layers.0`."""

    def __init__(self) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        self.stage = mesh["pp"].get_local_rank()
        self.x, self.c = tokens(mesh["dp"].get_local_rank(), 2)
        self.model = self.build()
        device = torch.device("cpu")
        stage = PipelineStage(self.model, self.stage, 2, device, group=mesh["pp"].get_group())
        self.schedule = ScheduleGPipe(stage, 1, loss_fn=lambda y, c: (y * c).sum())

    def build(self) -> nn.Module:
        return Model(self.stage, self.stage + 1)

    def step(self) -> None:
        if self.stage == 0:
            self.schedule.step(self.x)
        else:
            self.schedule.step(target=self.c)


class ExpertsWhole(Plan):
    def __init__(self) -> None:
        self.x, self.c = tokens()
        self.model = Experts([0, 1, 2, 3], [1, 2])


class ExpertParallel(Pipeline):
    """Two stages, and two ranks a stage with two experts of four each. All ranks of a stage have all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.c = tokens()

    def build(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
        rank = mesh["ep"].get_local_rank()
        return Experts([2 * rank, 2 * rank + 1], [self.stage + 1], mesh["ep"].get_group())


class FusedWhole(Plan):
    def __init__(self) -> None:
        self.x, self.c = (t[..., :FUSED_WIDTH] for t in tokens())
        self.model = FusedModel([0, 1])


class FusedExpertParallel(Pipeline):
    """As `ExpertParallel`, of experts held as one parameter: a DTensor sharded by experts."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.c = (t[..., :FUSED_WIDTH] for t in tokens())

    def build(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
        return FusedModel([self.stage], mesh["ep"])


class Unnumbered(Pipeline):
    """Stages whose models say nothing of their layers."""

    def build(self) -> nn.Module:
        linear = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(values(self.stage, HIDDEN, HIDDEN) / HIDDEN**0.5)
        return nn.Sequential(linear)


PLANS: dict[str, type[Plan]] = {
    each.__name__: each
    for each in (
        *(Plan, DataParallel, TensorParallel, SequenceParallel, Megatron),
        *(Pipeline, ExpertsWhole, ExpertParallel, FusedWhole, FusedExpertParallel, Unnumbered),
    )
}


def everyone(done: bool) -> bool:
    if not dist.is_initialized():
        return done
    flag = torch.tensor(float(done))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def probed(plan: Plan, controller: StandinController) -> dict[str, list[dict[str, Any]]]:
    """Step until all ranks have rows of their last roles; the rows by table."""
    optimizer = torch.optim.SGD(plan.model.parameters(), lr=0.0)

    def is_done() -> bool:
        rows = list(controller.rows.get("tensors", []))
        return len({row["role"] for row in rows}) == ROLES and len({row["step"] for row in rows}) > 2

    done = False
    while not done:
        optimizer.zero_grad()
        plan.step()
        optimizer.step()
        time.sleep(0.02)
        done = everyone(is_done())
    controller.send({"verb": "detach"})
    while not everyone(controller.closed.is_set()):
        optimizer.zero_grad()
        plan.step()
        optimizer.step()
        time.sleep(0.02)
    return controller.rows


def last_step(rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the last step that all six roles of all modules were measured in."""
    tensors = rows["tensors"]
    full = ROLES * len({row["module"] for row in tensors})
    step = max(step for step, n in Counter(row["step"] for row in tensors).items() if n == full)
    kept = {
        name: [row for row in rows.get(name, []) if row["step"] == step] for name in ("tensors", "outputs", "experts")
    }
    for row in (row for each in kept.values() for row in each):
        row["step"] = 0
    return {**kept, "modules": rows["modules"], "events": rows["events"]}


def main(names: list[str], rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(directory / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names:
        plan = PLANS[name]()
        with (
            tempfile.TemporaryDirectory() as scratch,
            controlled(
                Path(scratch), every=1, weights_every=1, whatifs=(), sensitivity_every=0, experts=-1
            ) as controller,
            agent_thread(controller),
        ):
            wait_for(lambda: list(controller.frames), "no agent")
            rows = probed(plan, controller)
        (directory / f"{name}.{rank}").write_text(json.dumps(last_step(rows)))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[4:], int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
