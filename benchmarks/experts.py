"""What probing fused experts costs: a layer's forward and backward with and without, and the measuring beside it.

    OMP_NUM_THREADS=1 python benchmarks/experts.py [--experts 8 64] [--pairs 15]

One layer of `Qwen3MoeExperts` of transformers, hidden 256, experts of 128, top 2 of E, 1,024 tokens, fp32, on the CPU.
A pair is one forward and backward without a probe and one with it armed for both parameters, as in a probed step with
weights; medians of the pairs. `outside` is the same with the probes there and not armed, as in all other steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.experts_probe import ExpertsProbe
from mxprobe.measuring.adapters.expert_structure import expert_parameters
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig

HIDDEN, WIDTH, TOP_K, TOKENS = 256, 128, 2, 1024


def layer(n_experts: int, implementation: str) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=n_experts, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return experts


def run(experts: Any, call: tuple[torch.Tensor, ...]) -> float:
    """Seconds of one forward and backward."""
    started = time.perf_counter()
    experts(*call).sum().backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| experts | called by | plain ms | outside a probed step | probed, both parameters | measured beside, s |")
    print("|---|---|---|---|---|---|")
    for n_experts in options.experts:
        for implementation in ("eager", "grouped_mm"):
            print(_row(n_experts, implementation, options.pairs), flush=True)


def _row(n_experts: int, implementation: str, pairs: int) -> str:
    torch.manual_seed(0)
    experts, clock, sent = layer(n_experts, implementation), Clock(), []
    chosen = torch.stack([torch.randperm(n_experts)[:TOP_K] for _ in range(TOKENS)])
    call = (torch.randn(TOKENS, HIDDEN), chosen, torch.rand(TOKENS, TOP_K))
    guard = Guard(0, lambda where, detail: print(where, detail), lambda: None)
    probes = [
        ExpertsProbe(
            part,
            experts,
            part=part,
            every_expert=False,
            clock=clock,
            guard=guard,
            submit=sent.append,
            max_rows=512,
            max_features=512,
            trains=True,
        )
        for part in expert_parameters(experts)
    ]
    clock.probed = clock.with_weights = True
    plain, outside, probed = [], [], []
    run(experts, call)
    for _ in range(pairs):
        plain.append(run(experts, call))
        outside.append(run(experts, call))
        for probe in probes:
            probe.arm()
        probed.append(run(experts, call))
        for probe in probes:
            probe.finish_step()
            probe.forget()
    started = time.perf_counter()
    for _ in measure_step(sent[:2], AgentConfig(), recipes={}, history=WeightHistory()):
        pass
    beside_s = time.perf_counter() - started
    plain_s, outside_s, probed_s = map(statistics.median, (plain, outside, probed))
    shares = [f"{100 * (each / plain_s - 1):+.0f} %" for each in (outside_s, probed_s)]
    return f"| {n_experts} | {implementation} | {1e3 * plain_s:.1f} | {' | '.join(shares)} | {beside_s:.2f} |"


if __name__ == "__main__":
    main()
