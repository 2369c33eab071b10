"""Stand-ins of an engine's layers and model: names and storage of SGLang 0.5.23 and compressed-tensors 0.20."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.agent.engines.layouts import decode_mxfp4
from mxprobe_kernels import error_fields
from mxprobe_kernels.formats import E2M1_GRID
from tests.standin_modules import pretend


def pack_mxfp4(w: torch.Tensor, rule: str = "rceil") -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [O, K/2], low nibble first, exponents + 127 uint8 [O, K/32]) of w [O, K] under a rule."""
    fields = error_fields(w.float(), rule=rule)
    exponent = fields.scales.exponent.reshape(len(w), -1)
    q = fields.q.float().reshape(len(w), -1, 32)
    steps = (q.abs() / torch.exp2(exponent.float())[..., None])[..., None]
    codes = (steps - torch.tensor(E2M1_GRID)).abs().argmin(-1) + 8 * (q < 0)
    codes = codes.reshape(len(w), -1).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4), (exponent + 127).to(torch.uint8)


@pretend("sglang.srt.layers.linear")
class LinearBase(nn.Module):
    """sglang 0.5.23, sglang/srt/layers/linear.py: `output_sizes` of what is fused, `tp_size`."""

    def __init__(
        self, in_features: int, output_sizes: Sequence[int], *, packed: bool = False, tp_size: int = 1
    ) -> None:
        super().__init__()
        self.output_sizes, self.tp_size, self._packed = list(output_sizes), tp_size, packed
        n_out = sum(output_sizes)
        if packed:
            self.weight_packed = nn.Parameter(torch.zeros(n_out, in_features // 2, dtype=torch.uint8), False)
            self.weight_scale = nn.Parameter(torch.zeros(n_out, in_features // 32, dtype=torch.uint8), False)
        else:
            self.weight = nn.Parameter(torch.zeros(n_out, in_features), False)

    def put(self, first: int, w: torch.Tensor) -> None:
        rows = slice(first, first + len(w))
        if self._packed:
            self.weight_packed[rows], self.weight_scale[rows] = pack_mxfp4(w)
        else:
            self.weight[rows] = w

    def forward(self, x: torch.Tensor) -> Any:
        w = decode_mxfp4(self.weight_packed, self.weight_scale) if self._packed else self.weight
        return F.linear(x, w), None


class Layer(nn.Module):
    def __init__(self, size: int, packed: bool) -> None:
        super().__init__()
        self.qkv_proj = LinearBase(size, [size, size // 2, size // 2], packed=packed)
        self.o_proj = LinearBase(size, [size], packed=packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, _ = self.qkv_proj(x)
        return self.o_proj(q[..., : x.shape[-1]])[0]  # type: ignore[no-any-return]


class EngineModel(nn.Module):
    """`load_weights(weights)` as sglang/srt/models/qwen3.py has it: (name, tensor) pairs into the fused layers."""

    def __init__(self, n_layers: int, size: int, *, packed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, packed) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        offsets = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
        for name, w in weights:
            above, _, last = name.removesuffix(".weight").rpartition(".")
            layer: Any = self.get_submodule(above)
            if last in offsets:
                layer.qkv_proj.put(sum(layer.qkv_proj.output_sizes[: offsets[last]]), w)
            else:
                layer.o_proj.put(0, w)
