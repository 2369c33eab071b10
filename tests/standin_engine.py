"""Stand-ins of an engine: names and storage of SGLang 0.5.23, vLLM 0.33.0 and compressed-tensors 0.20."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.measuring.engines.layouts import decode_mxfp4
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


class Backend(Enum):
    """vllm 0.33.0, vllm/model_executor/layers/fused_moe/oracle/mxfp4.py: some of `Mxfp4MoeBackend`."""

    NONE = "None"
    FLASHINFER_TRTLLM_MXFP4_BF16 = "FLASHINFER_TRTLLM_MXFP4_BF16"
    FLASHINFER_CUTLASS_MXFP4_MXFP8 = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
    CUTLASS_MXFP4_MXFP4 = "CUTLASS_MXFP4_MXFP4"
    EMULATION = "EMULATION"
    MARLIN = "MARLIN"


def tiled_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [N, C] -> [N to 128, C to 4], tiles of 128 x 4: vllm 0.33.0, layers/quantization/utils/nvfp4_utils.py."""
    n, c = scale.shape
    padded = F.pad(scale, (0, -c % 4, 0, -n % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape)


_ROW_OF = [(i % 4) * 8 + i // 4 for i in range(32)]
"""flashinfer 0.7.4, flashinfer/utils.py: where each of 32 rows goes, 0, 8, 16, 24, 1, 9, ..."""


def shuffled_rows(n: int) -> torch.Tensor:
    """int64 [n]: the old row that each new row is, for an epilogue tile of 128."""
    old = torch.arange(n)
    new = old // 32 * 32 + torch.tensor(_ROW_OF)[old % 32]
    return torch.empty_like(old).scatter_(0, new, old)


@pretend("vllm.model_executor.layers.quantization.mxfp4")
class Mxfp4MoEMethod:
    """vllm 0.33.0: gate over up as loaded, then what the kernel wants."""

    def __init__(self, backend: Backend) -> None:
        self.mxfp4_backend = backend

    def loaded(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([gate, up])

    def parts(self, w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up of what was loaded, [E, 2 F, ...]."""
        gate, up = w13.chunk(2, dim=1)
        return gate, up

    def process_weights_after_loading(self, layer: Any) -> None:
        tensors = {name: getattr(layer, name).data for name in ("w13_weight", "w13_weight_scale")}
        for name, w13 in tensors.items():
            gate, up = self.parts(w13)
            if "TRTLLM" in self.mxfp4_backend.value:
                w13 = torch.stack([up, gate], 2).reshape(w13.shape)
            elif "FLASHINFER" in self.mxfp4_backend.value:
                w13 = torch.cat([up, gate], 1)
            setattr(layer, name, nn.Parameter(self.arranged(w13, name.endswith("scale")), False))
        for name in ("w2_weight", "w2_weight_scale"):
            w2 = getattr(layer, name).data
            setattr(layer, name, nn.Parameter(self.arranged(w2, name.endswith("scale")), False))

    def arranged(self, w: torch.Tensor, is_scale: bool) -> torch.Tensor:
        if "TRTLLM" in self.mxfp4_backend.value:
            w = w[:, shuffled_rows(w.shape[1])]
        if is_scale and self.mxfp4_backend not in (Backend.EMULATION, Backend.NONE):
            w = torch.stack([tiled_scales(each) for each in w])
        return w


@pretend("vllm.model_executor.layers.quantization.mxfp4")
class GptOssMxfp4MoEMethod(Mxfp4MoEMethod):
    """vllm 0.33.0: rows of gate and up alternate as loaded."""

    def loaded(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack([gate, up], 1).flatten(0, 1)

    def parts(self, w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return w13[:, ::2], w13[:, 1::2]


@pretend("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
class UnquantizedFusedMoEMethod:
    """vllm 0.33.0: as loaded for the Triton kernels."""

    unquantized_backend = "TRITON"

    def loaded(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([gate, up])


class RoutedExperts(nn.Module):
    """vllm 0.33.0, vllm/model_executor/layers/fused_moe/routed_experts.py: experts, packed or not, `quant_method`."""

    def __init__(self, experts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], method: Any) -> None:
        """(gate, up [F, H], down [H, F]) of each expert."""
        super().__init__()
        self.quant_method = method
        w13 = [method.loaded(gate, up) for gate, up, _ in experts]
        w2 = [down for _, _, down in experts]
        for name, each in (("w13_weight", w13), ("w2_weight", w2)):
            if isinstance(method, UnquantizedFusedMoEMethod):
                setattr(self, name, nn.Parameter(torch.stack(each), False))
                continue
            packed = [pack_mxfp4(w) for w in each]
            for suffix, i in (("", 0), ("_scale", 1)):
                setattr(self, name + suffix, nn.Parameter(torch.stack([p[i] for p in packed]), False))

    def spread(self, ep_rank: int, ep_size: int, *, round_robin: bool = False, enable_eplb: bool = False) -> None:
        """Keep one rank's experts, as vllm/.../fused_moe/expert_map_manager.py places and numbers them."""
        n = len(next(self.parameters()))
        own = range(ep_rank, n, ep_size) if round_robin else range(ep_rank * n // ep_size, (ep_rank + 1) * n // ep_size)
        for name, p in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(p.data[list(own)], False))
        parallel = SimpleNamespace(tp_size=1, ep_size=ep_size, ep_rank=ep_rank, enable_eplb=enable_eplb)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        self.global_num_experts, self.local_num_experts = n, len(own)
        expert_map = torch.full((n,), -1, dtype=torch.int32)
        expert_map[list(own)] = torch.arange(len(own), dtype=torch.int32)
        self.register_buffer("_expert_map", expert_map, persistent=False)
        self.expert_map_manager = SimpleNamespace(_expert_map_cpu=expert_map)
