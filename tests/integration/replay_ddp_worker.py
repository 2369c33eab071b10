"""One rank of a run of the small language model, first alone, then with replays; prints what it made of both.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 replay_ddp_worker.py RENDEZVOUS DIRECTORY ddp|fsdp2
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from mxprobe.measuring.replay import sharded as sharding
from mxprobe.measuring.replay.arms import replay_arms
from mxprobe.measuring.replay.captured_call import Call, capture, forward, replayed
from mxprobe.measuring.replay.preservation import RandomState
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.measuring.replay.sharded import is_sharded
from tests import small_lm
from tests.standin_controller import agent_thread, controlled, wait_for

STEPS = 8


def wrapped(model: Any, how: str, dtype: torch.dtype | None = None) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    for block in model.layers:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(dtype))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(dtype, output_dtype=torch.float32))


def train(rank: int, how: str, after_first: Any = None, before_last: Any = None) -> str:
    torch.manual_seed(0)
    model = wrapped(small_lm.SmallLM(n_layers=1), how)
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
    state = [getattr(p, "_local_tensor", p).detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join([*state, torch.get_rng_state().numpy().tobytes()])).hexdigest()


def captured(model: nn.Module, ids: torch.Tensor) -> tuple[Call, torch.Tensor]:
    """A call of a sharded model with its parameters, as the agent's hooks take it, and what it returned."""
    calls: list[Call] = []

    def enter(root: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(capture(root, args, kwargs))
        calls[0].whole.take(root)

    handles = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    inner = [m for m in model.modules() if is_sharded(m) and m is not model]
    handles += [m.register_forward_pre_hook(lambda m, args: calls[0].whole.take(m)) for m in inner]
    output = model(ids)
    for handle in handles:
        handle.remove()
    return calls[0], output.detach()


def replays_like_an_unsharded_model(rank: int) -> bool:
    """The same sums to the last bit; with mixed precision, the same output as in the run. Rank 1 does not take part."""
    ids = small_lm.batch(4, seed=rank)
    torch.manual_seed(1)
    plain = small_lm.SmallLM(n_layers=2)
    sharded = wrapped(copy.deepcopy(plain), "fsdp2")
    call, _ = captured(sharded, ids)
    half = wrapped(copy.deepcopy(plain), "fsdp2", torch.bfloat16)
    half_call, half_output = captured(half, ids)
    if rank == 1:
        return True
    alone = Call(plain, (ids,), {}, RandomState.now(plain), "cpu", None)
    rows = [
        [arm.row() for arm in replay_arms(each, small_lm.linears(model), ("q", "mxfp8"))]
        for each, model in ((call, sharded), (alone, plain))
    ]
    with replayed(half_call, gradient=False):
        again = forward(half_call)
    return str(rows[0]) == str(rows[1]) and again.dtype == torch.bfloat16 and torch.equal(again.float(), half_output)


def refusals() -> list[str]:
    """What is said of a model that is too large to be copied, and of one whose parameters were not all gathered."""
    said: list[str] = []
    model, ids = wrapped(small_lm.SmallLM(n_layers=1), "fsdp2"), small_lm.batch(1, seed=0)
    limit, sharding.MAX_PARAMETER_BYTES = sharding.MAX_PARAMETER_BYTES, 1 << 10
    for _ in range(2):
        try:
            with replayed(capture(model, (ids,), {}), gradient=False):
                said.append("")
        except NotReplayableError as error:
            said.append(str(error))
        sharding.MAX_PARAMETER_BYTES = limit
    return said


def main() -> None:
    rank, how = int(os.environ["RANK"]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    facts: dict[str, Any] = {"like_unsharded": how == "ddp" or replays_like_an_unsharded_model(rank)}
    facts["refusals"] = refusals() if how == "fsdp2" else []
    alone = train(rank, how)
    directory = Path(sys.argv[2]) / str(rank)
    directory.mkdir()
    every = 2 + rank  # ranks replay at different steps, so that one which waited for another would hang
    config = {"every": 1000, "weights_every": 1000, "sensitivity_every": every, "replay_every": every}
    with controlled(directory, **config, replay_arms=("q",)) as controller:
        with agent_thread(controller):
            from torch.optim import optimizer as hooks

            wait_for(lambda: hooks._global_optimizer_post_hooks, "the agent does not watch")
            watched = train(rank, how, before_last=lambda: controller.send({"verb": "detach"}))
            controller.frame("detached")
        rows = controller.rows
    facts.update(same=alone == watched, errors=controller.frame("detached")["n_errors"])
    facts["replays"] = sum(row["arm"] != "floor" for row in rows.get("replays", []))  # the floor has no gradients
    facts["replay_gradients"] = len(rows.get("replay_gradients", []))
    facts["sensitivity"] = len(rows.get("sensitivity", []))
    facts["events"] = [row["detail"] for row in rows.get("events", []) if row["kind"] == "sensitivity"]
    print(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
