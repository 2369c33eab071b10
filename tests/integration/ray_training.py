"""A Ray cluster of its own with two training actors and one without torch.

    python ray_training.py DIRECTORY [--two-nodes]
    python ray_training.py DIRECTORY --control ATTACHED

Writes DIRECTORY/address once the actors train, their losses as hex to DIRECTORY/losses.RANK; ends when there is
DIRECTORY/stop. With --control the same loops run here, one after the other, without Ray, for as many steps as those of
ATTACHED; with --two-nodes the cluster has two nodes (two raylets on this machine) and a trainer on each.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

DIRECTORY = Path(sys.argv[1])


def train(rank: int, pause_s: float, steps: int | None = None) -> int:
    import torch
    from torch import nn

    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(DIRECTORY / f"losses.{rank}", "w", buffering=1) as losses:
        step = 0
        while step != steps and not (DIRECTORY / "stop").exists():
            step += 1
            x = torch.randn(16, 32)
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.write(loss.item().hex() + "\n")
            time.sleep(pause_s)
        losses.write(f"end {model[0].weight.sum().item().hex()}\n")
    return os.getpid()


def main(*, two_nodes: bool) -> None:
    import ray

    cluster = None
    if two_nodes:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"n0": 1}})
        cluster.add_node(num_cpus=1, resources={"n1": 1})
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
    else:
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, resources={"n0": 1, "n1": 1})

    @ray.remote(num_cpus=1)
    class Trainer:
        def train(self, rank: int) -> int:
            return train(rank, 0.02)

    @ray.remote(num_cpus=0)
    class Counter:
        def count(self, seconds: float) -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.01)

    counter = Counter.remote()
    counting = counter.count.remote(120.0)
    trainers = [Trainer.options(resources={f"n{node}": 0.1}).remote() for node in range(2)]
    training = [trainer.train.remote(rank) for rank, trainer in enumerate(trainers)]
    (DIRECTORY / "address.new").write_text(ray.get_runtime_context().gcs_address)
    (DIRECTORY / "address.new").rename(DIRECTORY / "address")
    pids = ray.get(training)
    ray.cancel(counting)
    (DIRECTORY / "pids").write_text(" ".join(map(str, pids)))
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[2:3] == ["--control"]:
        for each in range(2):
            train(each, 0.0, len(Path(sys.argv[3], f"losses.{each}").read_text().splitlines()) - 1)
    else:
        main(two_nodes="--two-nodes" in sys.argv)
