"""One rank of `test_emulation_distributed`: trains a step under emulation and compares with two local passes."""

import copy
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mxprobe


def main(wrapper: str, order: str, rendezvous: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    train(wrapper, order, rank, world)
    # torch aborts ("terminate called") about one process in eight whose FSDP2 state outlives the group it uses.
    gc.collect()
    dist.destroy_process_group()


def train(wrapper: str, order: str, rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.SiLU(), nn.Linear(64, 40))
    batches = torch.randn(world, 7, 40)

    alone = copy.deepcopy(model)
    with mxprobe.emulate(alone, "paper"):
        for batch in batches:
            (alone(batch).square().sum() / world).backward()
    expected = [p.grad for p in alone.parameters()]

    if order == "emulate-first":
        mxprobe.emulate(model, "paper")
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    if order == "wrap-first":
        mxprobe.emulate(wrapped, "paper")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(batches[rank]).square().sum().backward()
        optimizer.step()

    for parameter, want in zip(wrapped.parameters(), expected, strict=True):
        grad = parameter.grad
        assert grad is not None
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(full, want, rtol=1e-5, atol=1e-5)
    print("gradients agree", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
