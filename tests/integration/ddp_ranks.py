"""A DDP or FSDP2 job under torchrun or accelerate, on gloo: each rank writes its losses as hex, its PID, and its end.

    torchrun --standalone --nproc-per-node=2 ddp_ranks.py DIRECTORY STEPS [--workers 2] [--fsdp2] [--order 7=RECIPE]

The job ends after STEPS steps or, with STEPS 0, at the first multiple of ten after DIRECTORY/stop is there
(decided by rank 0 for all). An order has the model emulate a recipe once so many steps are done.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--pause-s", type=float, default=0.01)
parser.add_argument("--fsdp2", action="store_true")
parser.add_argument("--order", default="")
options = parser.parse_args()

torch.set_num_threads(1)
# `accelerate launch` of one process sets none of these.
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
data = TensorDataset(torch.randn(64, 32))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
if options.fsdp2:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
workers = {"num_workers": options.workers, "multiprocessing_context": "fork", "persistent_workers": True}
loader = DataLoader(data, batch_size=16, **(workers if options.workers else {}))
(options.directory / f"pid.{rank}").write_text(str(os.getpid()))


def is_over(step: int) -> bool:
    if options.steps:
        return step >= options.steps
    if step % 10:
        return False
    stop = torch.tensor(float((options.directory / "stop").exists()))
    dist.broadcast(stop, 0)
    return bool(stop.item())


def obey(step: int) -> None:
    at, _, recipe = options.order.partition("=")
    if at == str(step):
        import mxprobe

        mxprobe.emulate(model, recipe)


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if options.fsdp2 else parameter


with open(options.directory / f"losses.{rank}", "w", buffering=1) as losses:
    step = 0
    while not is_over(step):
        for (x,) in loader:
            if is_over(step):
                break
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.write(loss.item().hex() + "\n")
            step += 1
            obey(step)
            time.sleep(options.pause_s)
    parameters = b"".join(local(p).detach().numpy().tobytes() for p in model.parameters())
    state = hashlib.sha256(parameters + torch.get_rng_state().numpy().tobytes()).hexdigest()
    losses.write(f"end {state}\n")
dist.barrier()
dist.destroy_process_group()
