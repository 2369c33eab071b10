"""One rank of a DDP run of the small language model, first alone, then with replays; prints what it made of both.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 replay_ddp_worker.py RENDEZVOUS DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import small_lm
from tests.standin_controller import agent_thread, controlled, wait_for

STEPS = 8


def train(rank: int, after_first: Any = None, before_last: Any = None) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(small_lm.SmallLM(n_layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        if step == STEPS - 1 and before_last:
            before_last()
        ids = small_lm.batch(4, seed=100 * rank + step)
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and after_first:
            after_first()
    state = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join([*state, torch.get_rng_state().numpy().tobytes()])).hexdigest()


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    alone = train(rank)
    directory = Path(sys.argv[2]) / str(rank)
    directory.mkdir()
    with controlled(directory, every=1000, weights_every=1000, replay_every=2, replay_arms=("q",)) as controller:
        with agent_thread(controller):
            from torch.optim import optimizer as hooks

            wait_for(lambda: hooks._global_optimizer_post_hooks, "the agent does not watch")
            watched = train(rank, before_last=lambda: controller.send({"verb": "detach"}))
            controller.frame("detached")
        rows = controller.rows
    facts = {"same": alone == watched, "errors": controller.frame("detached")["n_errors"]}
    n_replays = sum(row["arm"] != "floor" for row in rows.get("replays", []))  # the floor has no gradients
    print(json.dumps({**facts, "replays": n_replays, "replay_gradients": len(rows.get("replay_gradients", []))}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
