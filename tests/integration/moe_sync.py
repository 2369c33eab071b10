"""A real tiny Qwen3-MoE that is trained, and an engine with vLLM's names that is given its weights after every step.

    moe_sync.py trainer|engine DIRECTORY

The trainer writes `weights.N`, and goes on once the engine has written `loaded.N`. Both end when `stop` is there. With
`plant` there, the engine leaves layer 1 three steps behind and turns down_proj of expert 2 in layer 0.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.moe_models import SHARED, tokens
from tests.standin_engine import Backend, Mxfp4MoEMethod, RoutedExperts, UnquantizedFusedMoEMethod

N_EXPERTS, LAG = 4, 3
EXPERTS = "model.layers.{}.mlp.experts"


def write(path: Path, thing: Any) -> None:
    torch.save(thing, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def train(directory: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {**SHARED, "intermediate_size": 64, "moe_intermediate_size": 64}
    config: Any = transformers.Qwen3MoeConfig(num_experts=N_EXPERTS, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    while not (directory / "stop").exists():
        time.sleep(0.05)  # as long as a step of a model that is worth it
        ids = tokens(4, 32, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        held = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters() if ".experts." in name}
        write(directory / f"weights.{step}", held)
        while not (directory / f"loaded.{step}").exists() and not (directory / "stop").exists():
            time.sleep(0.002)


class Layer(nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        shape = SHARED["hidden_size"], 64
        empty = [(torch.ones(*shape), torch.ones(*shape), torch.ones(*shape)) for _ in range(N_EXPERTS)]
        self.mlp.experts.routed_experts = RoutedExperts(empty, method)

    @torch.no_grad()
    def load(self, experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Into the parameters that are there, as the kernel wants them."""
        held: Any = self.mlp.experts.routed_experts  # type: ignore[union-attr]
        loaded = RoutedExperts(experts, held.quant_method)
        if hasattr(held.quant_method, "process_weights_after_loading"):
            held.quant_method.process_weights_after_loading(loaded)
        for name, parameter in loaded.named_parameters():
            setattr(held, name, nn.Parameter(parameter.data, False))


class Engine(nn.Module):
    """Layer 0 as loaded, layer 1 packed and shuffled for FlashInfer's TensorRT-LLM kernels."""

    def __init__(self) -> None:
        super().__init__()
        methods = UnquantizedFusedMoEMethod(), Mxfp4MoEMethod(Backend.FLASHINFER_TRTLLM_MXFP4_BF16)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(method) for method in methods)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], turned: tuple[int, int] | None = None) -> None:
        """`turned`: (layer, expert) whose down_proj is loaded the wrong way round."""
        given = dict(weights)
        for number, layer in enumerate(self.model.layers):  # type: ignore[arg-type]
            both, down = (given[f"{EXPERTS.format(number)}.{name}"] for name in ("gate_up_proj", "down_proj"))
            experts = [
                (*gate_up.chunk(2), d.T.contiguous() if (number, e) == turned else d)
                for e, (gate_up, d) in enumerate(zip(both, down, strict=True))
            ]
            layer.load(experts)


def serve(directory: Path) -> None:
    model, kept, step = Engine(), deque[dict[str, torch.Tensor]](maxlen=LAG + 1), 0
    while not (directory / "stop").exists():
        path = directory / f"weights.{step + 1}"
        has_come = path.exists()
        if has_come:
            step += 1
            kept.append(torch.load(path))
            path.unlink()
            planted = (directory / "plant").exists()
            given = {**kept[-1], **{n: w for n, w in kept[0].items() if planted and "layers.1." in n}}
            model.load_weights(given.items(), turned=(0, 2) if planted else None)
        with torch.no_grad():
            model(torch.randn(2, 8))
        if has_come:
            (directory / f"loaded.{step}").touch()
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": train, "engine": serve}[sys.argv[1]](Path(sys.argv[2]))
