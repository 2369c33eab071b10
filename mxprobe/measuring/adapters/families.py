"""Every adapter, the particular before the general; the first that recognises a module is its own."""

from __future__ import annotations

from torch import nn

from mxprobe.measuring.adapters.adapter import Adapter
from mxprobe.measuring.adapters.fake_quant import ModelOptAdapter, TorchaoAdapter, VerlAdapter
from mxprobe.measuring.adapters.fused_experts import ExpertsAdapter, RouterAdapter
from mxprobe.measuring.adapters.megatron import ColumnParallelAdapter, RowParallelAdapter
from mxprobe.measuring.adapters.tensor_parallel import TensorParallelAdapter
from mxprobe.measuring.adapters.torch_linear import LinearAdapter
from mxprobe.measuring.adapters.transformer_engine import (
    GroupedLinearAdapter,
    LayerNormLinearAdapter,
    LayerNormMLPAdapter,
    TransformerEngineAdapter,
)

ADAPTERS: tuple[Adapter, ...] = (
    ColumnParallelAdapter(),
    RowParallelAdapter(),
    LayerNormLinearAdapter(),
    LayerNormMLPAdapter(),
    GroupedLinearAdapter(),
    TransformerEngineAdapter(),
    ModelOptAdapter(),
    TorchaoAdapter(),
    VerlAdapter(),
    TensorParallelAdapter(),
    RouterAdapter(),
    ExpertsAdapter(),
    LinearAdapter(),
)


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter that recognises the module, whether it fits or not; None where no GEMM of it is known."""
    return next((adapter for adapter in ADAPTERS if adapter.recognises(module)), None)
