"""TransformerEngine's `Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear`. Not verified on a GPU.

    module            X                    y, G             not seen
    Linear            its input            its output
    LayerNormLinear   norm(its input)      its output
    LayerNormMLP fc1  norm(its input)      -                y and G: inside the fused module
    LayerNormMLP fc2  -                    its output       X: the activation is inside the fused module
    GroupedLinear     rows of its input    of its output    (of each expert: see `mxprobe.agent.probes.grouped_probe`)

norm(x) is computed again on the sampled rows:

    RMSNorm     x / sqrt(mean(x^2) + eps) * gamma
    LayerNorm   (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta       gamma: weight, + 1 where it is zero-centred

in float32, and rounded to the dtype the GEMM gets. Weights held in FP8 or MXFP8 (`fp8_model_init`) are
already rounded: W is then the master that the optimizer keeps (`main_param`), and without one it is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import (
    Adapter,
    Reading,
    Rows,
    Signature,
    Unread,
    first_argument,
    first_of,
    held,
    unreadable,
)
from mxprobe.measuring.adapters.megatron import is_part, own_rows, row_parallel, shard_of
from mxprobe.measuring.adapters.placement import Placement, Shard
from mxprobe.measuring.isolation import is_plain

VERSION = "transformer-engine 2.20.2"
_CALL = ("inp", "is_first_microbatch")
_PARALLEL = ("tp_size", "tp_group", "sequence_parallel")
_LINEAR = ("in_features", "out_features", "weight_names", "parallel_mode", "apply_bias")
_NORM = ("eps", "normalization", "zero_centered_gamma", "layer_norm_weight")
FC1, FC2 = "fc1", "fc2"


def _signature(class_name: str, forward: tuple[str, ...], *attributes: str) -> tuple[Signature, ...]:
    return (Signature("transformer_engine", class_name, VERSION, forward, (*attributes, *_PARALLEL)),)


class _EngineAdapter(Adapter):
    argument = "inp"

    def output_of(self, module: nn.Module, output: Any) -> Any:
        return first_of(output)


class TransformerEngineAdapter(_EngineAdapter):
    family = "TransformerEngine Linear"
    signatures = _signature("Linear", (*_CALL, "fp8_output", "fp8_grad"), *_LINEAR)

    def weight(self, module: nn.Module, part: str) -> Any:
        return stacked([master(held(module, name)) for name in held(module, "weight_names")])

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        if not held(module, "apply_bias"):
            return None
        return stacked([held(module, name) for name in held(module, "bias_names", ())])

    def operand(self, module: nn.Module) -> Rows | None:
        return None

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        shard, group = shard_of(held(module, "tp_group"))
        mode, operand = held(module, "parallel_mode"), self.operand(module)
        if mode == "column":
            tokens = shard if is_part(x, y, shard) else Shard()
            own = own_rows(y, x, tokens) if tokens.count > 1 else y
            placement = Placement(group, out_features=shard, x_tokens=tokens)
            return Reading(x, y, own, placement=placement, operand=operand)
        if mode == "row" and shard.count > 1:
            return row_parallel(x, y, shard, group)._replace(operand=operand)
        return Reading(x, y, y, placement=Placement(group), operand=operand)


class LayerNormLinearAdapter(TransformerEngineAdapter):
    family = "TransformerEngine LayerNormLinear"
    signatures = _signature("LayerNormLinear", (*_CALL, "fp8_output", "fp8_grad"), *_LINEAR, *_NORM)

    def operand(self, module: nn.Module) -> Rows | None:
        return norm_of(module)


class LayerNormMLPAdapter(_EngineAdapter):
    family = "TransformerEngine LayerNormMLP"
    signatures = _signature("LayerNormMLP", _CALL, "fc1_weight", "fc2_weight", *_NORM)

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        return (FC1,)

    def hidden(self, module: nn.Module) -> Mapping[str, tuple[tuple[int, int], str]]:
        n_out, n_in = held(module, "fc2_weight").shape
        return {FC2: ((n_out, n_in), "its input is made inside the fused LayerNormMLP, where no hook sees it")}

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        n_out, n_in = held(module, "fc1_weight").shape
        return n_out, n_in

    def weight(self, module: nn.Module, part: str) -> Any:
        return master(held(module, "fc1_weight"))

    def read(
        self, module: nn.Module, part: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Reading | Unread:
        x = first_argument(args, kwargs, self.argument)
        if not is_plain(x):
            return unreadable(x, output)
        shard, group = shard_of(held(module, "tp_group"))
        tokens = shard if held(module, "sequence_parallel") else Shard()
        withheld = "the output of fc1, and its gradient, stay inside the fused LayerNormMLP"
        placement = Placement(group, out_features=shard, x_tokens=tokens)
        return Reading(x, None, None, withheld, placement, norm_of(module))


class GroupedLinearAdapter(_EngineAdapter):
    """E experts in one call, rows of each behind one another; (output, biases) where it returns its biases."""

    family = "TransformerEngine GroupedLinear"
    signatures = _signature(
        "GroupedLinear",
        ("inp", "m_splits", "is_first_microbatch"),
        *("num_gemms", "in_features", "out_features", "apply_bias", "parallel_mode"),
    )

    def weight(self, module: nn.Module, part: str) -> Any:
        return None  # one each of many experts

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        if held(module, "tp_size") > 1:
            return "its experts are spread over tensor-parallel ranks"
        if splits_of(args, kwargs) is None:
            return "called without m_splits"
        return Reading(x, y, y)


def splits_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `m_splits` of a call of GroupedLinear: E numbers of rows, a list or a tensor."""
    return args[1] if len(args) > 1 else kwargs.get("m_splits")


def experts_of_grouped(module: nn.Module) -> tuple[list[Any], list[torch.Tensor]]:
    """Return W_e [O, K] of each expert in high precision, and b_e [O] that y contains (an empty list without bias)."""
    n = held(module, "num_gemms")
    biases = [held(module, f"bias{e}") for e in range(n)] if held(module, "apply_bias") else []
    return [master(held(module, f"weight{e}")) for e in range(n)], biases


def master(weight: Any) -> Any:
    """Return W in high precision: the parameter where it is plain, else the optimizer's copy; None without one."""
    if is_plain(weight):
        return weight
    main: Any = getattr(weight, "main_param", None)  # Megatron-Core 0.16.1: [n], flat; a part of W where sharded
    if is_plain(main) and main.numel() == weight.numel():
        return main.detach().reshape(weight.shape)
    return None


def stacked(parts: Sequence[Any]) -> torch.Tensor | None:
    """Join parameters that the module concatenates along out-features; None where one is not plain."""
    if not parts or not all(is_plain(each) for each in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.cat([each.detach() for each in parts])


def norm_of(module: nn.Module) -> Rows:
    """Return the function that maps rows [R, K] to norm(rows), as the module computes it before its GEMM."""
    gamma, beta = held(module, "layer_norm_weight").detach(), held(module, "layer_norm_bias")
    eps, centred = float(held(module, "eps")), bool(held(module, "zero_centered_gamma"))
    is_rms = held(module, "normalization") == "RMSNorm"

    def norm(x: torch.Tensor) -> torch.Tensor:
        v = x.float()
        if not is_rms:
            v = v - v.mean(-1, keepdim=True)
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        v = v * (gamma.float() + 1.0 if centred else gamma.float())
        if beta is not None and not is_rms:
            v = v + beta.detach().float()
        return v.to(x.dtype)

    return norm
