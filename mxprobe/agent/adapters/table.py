"""Every adapter, the particular before the general; the first that recognises a module is its own."""

from __future__ import annotations

from torch import nn

from mxprobe.agent.adapters.adapter import Adapter
from mxprobe.agent.adapters.fake_quant import ModelOptAdapter, TorchaoAdapter, VerlAdapter
from mxprobe.agent.adapters.linear import LinearAdapter
from mxprobe.agent.adapters.megatron import ColumnParallelAdapter, RowParallelAdapter
from mxprobe.agent.adapters.tensor_parallel import TensorParallelAdapter
from mxprobe.agent.adapters.transformer_engine import (
    GroupedLinearAdapter,
    LayerNormLinearAdapter,
    LayerNormMLPAdapter,
    TransformerEngineAdapter,
)
from mxprobe.agent.moe.adapters import ExpertsAdapter, RouterAdapter

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
    """The adapter that recognises the module, whether it fits or not; None where no GEMM of it is known."""
    return next((adapter for adapter in ADAPTERS if adapter.recognises(module)), None)
