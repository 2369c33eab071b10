"""Tiny real models with fused experts, from transformers' own classes, with weights large enough to route unevenly."""

from __future__ import annotations

from typing import Any

import torch

SHARED = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def tiny(family: str = "qwen3_moe", *, implementation: str = "eager", experts: int = 6, seed: int = 0) -> Any:
    """`qwen3_moe` (weights [E, O, K]) or `gpt_oss` ([E, K, O], biases); `implementation` as transformers names it."""
    import transformers

    if family == "qwen3_moe":
        config: Any = transformers.Qwen3MoeConfig(
            intermediate_size=64, moe_intermediate_size=48, num_experts=experts, num_experts_per_tok=2, **SHARED
        )
        kind: Any = transformers.Qwen3MoeForCausalLM
    else:
        config = transformers.GptOssConfig(
            intermediate_size=48, num_local_experts=experts, num_experts_per_tok=2, **SHARED
        )
        kind = transformers.GptOssForCausalLM
    config._experts_implementation = implementation
    torch.manual_seed(seed)
    model = kind(config)
    for name, parameter in model.named_parameters():
        if "experts" in name or "router" in name or name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SHARED["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))
