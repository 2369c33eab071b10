"""Which modules hold fused experts, and which are routers, told by structure and name.

Fused experts are one module with parameters [E, a, b], one matrix for each of E >= 2 experts, as in transformers 5
(`Qwen3MoeExperts`, `MixtralExperts`, `DeepseekV3Experts`, `GptOssExperts`, ...). A router owns one `weight` [E, K], has
no child, and is called one (`Qwen3MoeTopKRouter`, `DeepseekV3TopkRouter`, `MoEGate`, ...).
"""

from __future__ import annotations

import re

import torch
from torch import nn

_NEVER = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear)
_ROUTER = re.compile(r"[Rr]outer|Gate$|^gate$")
"""Not `Aggregate` or `Propagate`."""


def expert_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> [E, a, b], as the module holds them now; empty for a module that holds no fused experts."""
    if isinstance(module, _NEVER):
        return {}
    held = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.is_floating_point()}
    sizes = {p.shape[0] for p in held.values()}
    return dict(held) if len(sizes) == 1 and min(sizes) > 1 else {}


def is_router(module: nn.Module) -> bool:
    """Say whether the module owns one weight [E, K], and is called a router by its class."""
    if type(module) is nn.Linear or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    matrices = [name for name, p in module.named_parameters(recurse=False) if p.dim() >= 2]
    return matrices == ["weight"] and not list(module.children()) and bool(_ROUTER.search(type(module).__name__))
