"""Stand-ins for upstream modules that do not run without a GPU: names, signatures and attributes of named versions.

Each class says what it is pinned to; what it computes is the documented arithmetic, in plain torch. They are given the
upstream package's name, by which adapters recognise them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def pretend(package_module: str) -> Any:
    """Class decorator: the class says that it was defined there."""

    def mark(cls: type) -> type:
        cls.__module__ = package_module
        return cls

    return mark


class Group:
    """A process group of one's own imagination: rank and size. For tests that run in one process."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _TransformerEngine(nn.Module):
    """transformer-engine 2.20.2: what `TransformerEngineBaseModule` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.parallel_mode: str | None = None


@pretend("transformer_engine.pytorch.module.linear")
class Linear(_TransformerEngine):
    """transformer-engine 2.20.2, transformer_engine/pytorch/module/linear.py."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, return_bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.return_bias, self.apply_bias = return_bias, bias and not return_bias
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.randn(out_features)) if bias else None

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        out = F.linear(inp, self.weight, self.bias if self.apply_bias else None)
        return (out, self.bias) if self.return_bias else out


class _Norm(_TransformerEngine):
    def __init__(self, features: int, normalization: str, zero_centered_gamma: bool, eps: float) -> None:
        super().__init__()
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.randn(features) * 0.1 + (0.0 if zero_centered_gamma else 1.0))
        self.layer_norm_bias = nn.Parameter(torch.randn(features)) if normalization == "LayerNorm" else None

    def norm(self, inp: torch.Tensor) -> torch.Tensor:
        gamma = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "LayerNorm":
            return F.layer_norm(inp, gamma.shape, gamma, self.layer_norm_bias, self.eps)
        return F.rms_norm(inp, gamma.shape, gamma, self.eps)


@pretend("transformer_engine.pytorch.module.layernorm_linear")
class LayerNormLinear(_Norm):
    """transformer-engine 2.20.2, transformer_engine/pytorch/module/layernorm_linear.py."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
    ) -> None:
        super().__init__(in_features, normalization, zero_centered_gamma, eps)
        self.in_features, self.out_features = in_features, out_features
        self.weight_names, self.bias_names, self.apply_bias = ["query_weight", "kv_weight"], ["bias"], False
        self.query_weight = nn.Parameter(torch.randn(out_features // 2, in_features))
        self.kv_weight = nn.Parameter(torch.randn(out_features - out_features // 2, in_features))
        self.return_layernorm_output = return_layernorm_output

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        ln_out = self.norm(inp)
        out = F.linear(ln_out, torch.cat([self.query_weight, self.kv_weight]))
        return (out, ln_out) if self.return_layernorm_output else out


@pretend("transformer_engine.pytorch.module.layernorm_mlp")
class LayerNormMLP(_Norm):
    """transformer-engine 2.20.2, transformer_engine/pytorch/module/layernorm_mlp.py."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, "RMSNorm", False, eps)
        self.fc1_weight = nn.Parameter(torch.randn(ffn_hidden_size, hidden_size))
        self.fc2_weight = nn.Parameter(torch.randn(hidden_size, ffn_hidden_size))

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return F.linear(F.gelu(F.linear(self.norm(inp), self.fc1_weight)), self.fc2_weight)


@pretend("transformer_engine.pytorch.module.grouped_linear")
class GroupedLinear(_TransformerEngine):
    """transformer-engine 2.20.2, transformer_engine/pytorch/module/grouped_linear.py; `m_splits` may be a tensor."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool = False, return_bias: bool = False
    ) -> None:
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.apply_bias, self.return_bias = bias and not return_bias, return_bias
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(out_features, in_features)))
            if bias:
                self.register_parameter(f"bias{i}", nn.Parameter(torch.randn(out_features)))

    def forward(self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
        biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        added = biases if self.apply_bias else [None] * self.num_gemms
        out = torch.cat([F.linear(x, w, b) for x, w, b in zip(inp.split(sizes), weights, added, strict=True)])
        return (out, biases) if self.return_bias else out


@pretend("megatron.core.tensor_parallel.layers")
class ColumnParallelLinear(nn.Module):
    """megatron-core 0.16.1, megatron/core/tensor_parallel/layers.py. The collectives are the caller's to replace."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp_group: Any = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        n = tp_group.size() if tp_group is not None else 1
        self.input_size, self.output_size, self.output_size_per_partition = input_size, output_size, output_size // n
        self.gather_output, self.skip_bias_add, self.sequence_parallel = gather_output, skip_bias_add, sequence_parallel
        self.tp_group = tp_group
        self.weight: Any = nn.Parameter(torch.randn(output_size // n, input_size) / input_size**0.5)
        self.bias = nn.Parameter(torch.randn(output_size // n)) if bias else None

    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        x = self.gathered(input_, 0) if self.sequence_parallel else input_
        y = F.linear(x, self.weight if weight is None else weight, None if self.skip_bias_add else self.bias)
        return (self.gathered(y, -1) if self.gather_output else y), (self.bias if self.skip_bias_add else None)


@pretend("megatron.core.tensor_parallel.layers")
class RowParallelLinear(nn.Module):
    """megatron-core 0.16.1, megatron/core/tensor_parallel/layers.py. The collectives are the caller's to replace."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp_group: Any = None,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        n = tp_group.size() if tp_group is not None else 1
        self.input_size, self.output_size, self.input_size_per_partition = input_size, output_size, input_size // n
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.sequence_parallel, self.tp_group = sequence_parallel, tp_group
        self.weight = nn.Parameter(torch.randn(output_size, input_size // n) / input_size**0.5)
        self.bias = nn.Parameter(torch.randn(output_size)) if bias else None

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def forward(self, input_: torch.Tensor) -> Any:
        x = input_
        if not self.input_is_parallel and self.tp_group is not None:
            n = self.input_size_per_partition
            x = input_.narrow(-1, self.tp_group.rank() * n, n)
        y = self.reduced(F.linear(x, self.weight))
        if not self.skip_bias_add and self.bias is not None:
            y = y + self.bias
        return y, (self.bias if self.skip_bias_add else None)


class _STE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: float) -> torch.Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@pretend("verl.utils.qat.linear")
class QATLinear(nn.Linear):
    """verl 0.9.1, verl/utils/qat/linear.py; rounds to quarters in place of NVFP4, which needs a GPU."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, group_size: int = 16) -> None:
        super().__init__(in_features, out_features, bias)
        self.mode, self.group_size, self.fake_quant_enabled = "w4a4", group_size, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_STE.apply(x, 0.25), _STE.apply(self.weight, 0.25), self.bias)


@pretend("modelopt.torch.quantization.nn.modules.tensor_quantizer")
class TensorQuantizer(nn.Module):
    """nvidia-modelopt 0.47.0, modelopt/torch/quantization/nn/modules/tensor_quantizer.py."""

    def __init__(self) -> None:
        super().__init__()
        self._disabled, self._rotate = False, False
        self._enable_pre_quant_scale = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = self._buffers.get("_pre_quant_scale")
        return _STE.apply(inputs if scale is None else inputs * scale, 0.25)


@pretend("modelopt.torch.quantization.nn.modules.quant_module")
class QuantLinearConvBase(nn.Module):
    """nvidia-modelopt 0.47.0, modelopt/torch/quantization/nn/modules/quant_module.py."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.quantized(input)  # type: ignore[no-any-return, operator]


@pretend("modelopt.torch.quantization.nn.modules.quant_linear")
class QuantLinear(QuantLinearConvBase, nn.Linear):
    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Linear.__init__(self, in_features, out_features)
        self.input_quantizer, self.weight_quantizer = TensorQuantizer(), TensorQuantizer()
        self.output_quantizer = nn.Identity()

    def quantized(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)
