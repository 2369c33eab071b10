"""How engines store a weight, and the trainer's weights in it: the layout table.

| layout       | stored as                                            | of                                        |
|--------------|------------------------------------------------------|-------------------------------------------|
| plain        | `weight` [O, K], floating point                      | any Linear of vLLM, SGLang, transformers  |
| mxfp4 packed | `weight_packed` uint8 [O, K/2], `weight_scale` uint8 | compressed-tensors 0.20: low nibble first, |
|              | [O, K/32]: E2M1 codes, E8M0 exponents                | exponent + 127                            |
| experts      | `w13_weight` [E, 2 F, H], `w2_weight` [E, H, F]      | `FusedMoE`: gate over up in w13           |

Several weights are one above the other where `output_sizes` says so (SGLang 0.5.23, vLLM): `qkv_proj`, `gate_up_proj`.
Of anything else (Marlin and FlashInfer permute codes, scales are swizzled, a rank of several holds a shard) it is said
that it cannot be compared: a hash of the wrong bytes is a false alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Union

import torch
from torch import nn

from mxprobe.agent.adapters.adapter import held
from mxprobe_kernels.formats import E2M1_GRID

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
}
"""Last part of an engine's name -> the trainer's names of the weights in it, in order."""
EXPERTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("w13_weight", ("gate_proj", "up_proj")),
    ("w2_weight", ("down_proj",)),
)
BLOCK = 32
PLAIN, PACKED, STACKED = "plain", "mxfp4 packed", "experts"


class HeldWeight(NamedTuple):
    """One of the trainer's weights, as the engine holds it."""

    module: str
    """The trainer's name."""
    shape: tuple[int, int]
    """[O, K]"""
    layout: str
    device: torch.device
    """Where it is."""
    rows: Callable[[torch.Tensor], torch.Tensor]
    """int64 [F] of range(O) -> values [F, K], a copy."""
    columns: Callable[[torch.Tensor], torch.Tensor] | None
    """int64 [F] of range(K) -> values of these columns [F, O], a copy; None where codes run along K."""


class NotComparable(NamedTuple):
    module: str
    why: str


def weights_of(root: nn.Module) -> Iterator[HeldWeight | NotComparable]:
    """Every weight that a GEMM of the model multiplies by, as far as the table knows its layout."""
    for name, module in root.named_modules():
        parameters = {n: p for n, p in vars(module)["_parameters"].items() if p is not None and p.dim() >= 2}
        if not parameters or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        tp_size = held(module, "tp_size", 1)
        if isinstance(tp_size, int) and tp_size > 1:
            yield NotComparable(name, f"a shard of {tp_size}")
        elif "w13_weight" in parameters:
            yield from _experts(name, parameters)
        elif "weight_packed" in parameters:
            yield from _fused(name, module, parameters, _packed)
        elif parameters.get("weight") is not None:
            yield from _fused(name, module, parameters, _plain)
        else:
            yield NotComparable(name, f"unknown layout: {', '.join(sorted(parameters))}")


_Read = Callable[[dict[str, Any]], Union[tuple[torch.Tensor, int, str], str]]


def _plain(parameters: dict[str, Any]) -> tuple[torch.Tensor, int, str] | str:
    weight = parameters["weight"]
    if not weight.is_floating_point() or weight.element_size() < 2 or weight.dim() != 2:
        return f"unknown layout: weight is {str(weight.dtype).replace('torch.', '')} {list(weight.shape)}"
    return weight, weight.shape[1], PLAIN


def _packed(parameters: dict[str, Any]) -> tuple[torch.Tensor, int, str] | str:
    codes, scale = parameters["weight_packed"], parameters.get("weight_scale")
    if codes.dtype is not torch.uint8 or scale is None or scale.dtype is not torch.uint8 or codes.dim() != 2:
        return "unknown layout: weight_packed without a weight_scale of E8M0 exponents"
    n_in = codes.shape[1] * 2
    if tuple(scale.shape) != (codes.shape[0], -(-n_in // BLOCK)):
        return f"unknown layout: weight_scale {list(scale.shape)} for codes {list(codes.shape)}, swizzled perhaps"
    return codes, n_in, PACKED


def _fused(
    name: str, module: nn.Module, parameters: dict[str, Any], read: _Read
) -> Iterator[HeldWeight | NotComparable]:
    found = read(parameters)
    if isinstance(found, str):
        yield NotComparable(name, found)
        return
    stored, n_in, layout = found
    sizes = held(module, "output_sizes")
    above, _, last = name.rpartition(".")
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2:
        names, sizes = (name,), (stored.shape[0],)
    else:
        names = tuple(f"{above}.{part}".lstrip(".") for part in FUSED.get(last, ()))
    if len(names) != len(sizes) or sum(sizes) != stored.shape[0]:
        yield NotComparable(name, f"unknown layout: {len(sizes)} weights of {list(sizes)} rows in {stored.shape[0]}")
        return
    first = 0
    for each, size in zip(names, sizes):
        scale = parameters.get("weight_scale")
        yield _held(each, stored, scale if layout == PACKED else None, first, size, n_in, layout)
        first += size


def _held(
    name: str, stored: torch.Tensor, scale: torch.Tensor | None, first: int, size: int, n_in: int, layout: str
) -> HeldWeight:
    def rows(index: torch.Tensor) -> torch.Tensor:
        at = index.to(stored.device) + first
        part = stored.detach().index_select(0, at)
        return part if scale is None else decode_mxfp4(part, scale.detach().index_select(0, at))

    def columns(index: torch.Tensor) -> torch.Tensor:
        return stored.detach()[first : first + size].index_select(1, index.to(stored.device)).T.contiguous()

    return HeldWeight(name, (size, n_in), layout, stored.device, rows, columns if scale is None else None)


def _experts(name: str, parameters: dict[str, Any]) -> Iterator[HeldWeight | NotComparable]:
    for parameter, parts in EXPERTS:
        stored = parameters.get(parameter)
        if stored is None or not stored.is_floating_point() or stored.element_size() < 2 or stored.dim() != 3:
            yield NotComparable(name, f"unknown layout: {parameter} is no stack of floating-point matrices")
            continue
        size = stored.shape[1] // len(parts)
        for expert in range(stored.shape[0]):
            for i, part in enumerate(parts):
                full = f"{name}.{expert}.{part}"
                yield _held(full, stored[expert], None, i * size, size, stored.shape[2], STACKED)


def decode_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32 [F, K] of uint8 codes [F, K/2], the first element in the low nibble, and exponents + 127 [F, K/32]."""
    signed = (*E2M1_GRID, *(-value for value in E2M1_GRID))
    grid = torch.cat([torch.full((1,), value, device=codes.device) for value in signed])  # sent there, it would wait
    pairs = torch.stack([codes & 0xF, codes >> 4], -1).reshape(codes.shape[0], -1)
    values = grid[pairs.long()]
    scales = torch.exp2(exponents.float() - 127.0).repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values * scales
