"""How engines store a weight, and the trainer's weights in it: the layout table.

| layout       | stored as                                            | of                                        |
|--------------|------------------------------------------------------|-------------------------------------------|
| plain        | `weight` [O, K], floating point                      | any Linear of vLLM, SGLang, transformers  |
| mxfp4 packed | `weight_packed` uint8 [O, K/2], `weight_scale` uint8 | compressed-tensors 0.20: low nibble first, |
|              | [O, K/32]: E2M1 codes, E8M0 exponents                | exponent + 127                            |
|              | `weight` uint8 [O, K/2], `weight_scale`, by the      | vLLM 0.33.0, after                        |
|              | layer's kernel                                       | `process_weights_after_loading`           |
| experts      | `w13_weight` [E, 2 F, H], `w2_weight` [E, H, F]      | `FusedMoE`: gate over up in w13           |
| experts,     | the same as uint8 [E, 2 F, H/2], [E, H, F/2], with   | vLLM 0.33.0, SGLang 0.5.23: by            |
| packed       | `w13_weight_scale`, `w2_weight_scale`                | `quant_method`, see `shuffles`            |
| experts, as  | `gate_up_proj`, `down_proj`, either way              | transformers 5.24 that serves, see        |
| a trainer's  |                                                      | `parts`                                   |

Several weights are one above the other where `output_sizes` says so (SGLang 0.5.23, vLLM): `qkv_proj`, `gate_up_proj`.
Experts of one rank of several are numbered by vLLM's `_expert_map` (number in the whole model -> its own, or -1), of
which `expert_map_manager` has a copy on the host. Of anything else (Marlin permutes codes, a rank of several holds a
shard) it is said that it cannot be compared: a hash of the wrong bytes is a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import held
from mxprobe.measuring.compat import own_parts
from mxprobe.measuring.engines.expert_parts import CERTAIN, Part, parts_of
from mxprobe.measuring.engines.shuffles import (
    AS_LOADED,
    RowMap,
    Shuffle,
    experts_shuffle,
    linear_shuffle,
    scales_at,
    scales_needed,
)
from mxprobe.measuring.isolation import is_plain, kind_of
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
TURNED = "stored [in, out]"


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
    """Yield every weight that a GEMM of the model multiplies by, as far as the table knows its layout."""
    for name, module in root.named_modules():
        parameters = {n: p for n, p in own_parts(module, "_parameters").items() if p is not None and p.dim() >= 2}
        if not parameters or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        numbers = _numbers(module)
        n_ranks = max(_ranks(module))
        if n_ranks > 1:
            yield NotComparable(name, f"a shard of {n_ranks}")
        elif isinstance(numbers, str):
            yield NotComparable(name, numbers)
        elif "w13_weight" in parameters:
            yield from _experts(name.removesuffix(".routed_experts"), module, parameters, numbers)
        elif "weight_packed" in parameters or parameters.get("weight") is not None:
            yield from _fused(name, module, _packed(module, parameters) or _plain(parameters["weight"]))
        elif parts := parts_of(module):
            yield from _as_trained(name, parameters, parts)
        else:
            yield NotComparable(name, f"unknown layout: {', '.join(sorted(parameters))}")


_RANKS = ("tp_size", "moe_tp_size", "moe_ep_size")  # SGLang 0.5.23; vLLM 0.33.0 has the first


def _ranks(module: nn.Module) -> Iterator[int]:
    """Yield over how many ranks a layer's weights are spread, each way; but for vLLM's experts, which are numbered."""
    sizes = [held(module, name, 1) for name in _RANKS] + [getattr(_parallel(module), "tp_size", 1)]
    yield from (size for size in sizes if isinstance(size, int))


def _parallel(module: nn.Module) -> Any:
    return getattr(held(module, "moe_config"), "moe_parallel_config", None)


def _numbers(module: nn.Module) -> list[int] | str | None:
    """Return the numbers of a rank's experts in the whole model; None where it has all, else why they are unknown."""
    parallel = _parallel(module)
    n_ranks = getattr(parallel, "ep_size", 1)
    if not isinstance(n_ranks, int) or n_ranks == 1:
        return None
    if getattr(parallel, "enable_eplb", False):
        return f"experts of {n_ranks} ranks that are moved between them (EPLB)"
    on_host = getattr(held(module, "expert_map_manager"), "_expert_map_cpu", None)
    expert_map = on_host if isinstance(on_host, torch.Tensor) else held(module, "_expert_map")
    if not isinstance(expert_map, torch.Tensor) or expert_map.device.type != "cpu":  # to read it there would wait
        return f"experts of one of {n_ranks} ranks, without a map of their numbers on the host"
    if expert_map.dim() != 1 or held(module, "global_num_experts", len(expert_map)) != len(expert_map):
        return f"experts of one of {n_ranks} ranks, with others than the model's in the map of their numbers"
    own = {local: number for number, local in enumerate(expert_map.tolist()) if local >= 0}
    if sorted(own) != list(range(len(own))):
        return f"experts of one of {n_ranks} ranks, whose numbers are not one to each"
    return [own[local] for local in range(len(own))]


class _Matrix(NamedTuple):
    """A parameter that holds one or several weights one above the other."""

    stored: torch.Tensor
    """[N, K] values, or uint8 [N, K/2] codes."""
    n_in: int
    layout: str
    scale: torch.Tensor | None = None
    tiled_scales: bool = False

    def rows(self, at: torch.Tensor) -> torch.Tensor:
        """Copy the values [F, K] of stored rows, int64 [F]."""
        part = self.stored.detach().index_select(0, at)
        if self.scale is None:
            return part
        n_blocks = -(-self.n_in // BLOCK)
        return decode_mxfp4(part, scales_at(self.scale, at, n_blocks, tiled=self.tiled_scales))


def _plain(weight: torch.Tensor) -> _Matrix | str:
    if not weight.is_floating_point() or weight.element_size() < 2 or weight.dim() != 2:
        return f"unknown layout: weight is {kind_of(weight)}"
    return _Matrix(weight, weight.shape[1], PLAIN)


def _packed(module: nn.Module, parameters: dict[str, Any]) -> _Matrix | str | None:
    """Return None for a weight that is not packed."""
    codes, scale = parameters.get("weight_packed"), parameters.get("weight_scale")
    shuffle = AS_LOADED if codes is not None else linear_shuffle(module)
    codes = parameters["weight"] if codes is None else codes
    if codes.dtype is not torch.uint8 and "weight_packed" not in parameters:
        return None
    if codes.dtype is not torch.uint8 or scale is None or scale.element_size() != 1 or codes.dim() != 2:
        return "unknown layout: packed codes without a weight_scale of E8M0 exponents"
    if isinstance(shuffle, str):
        return shuffle
    n_in = codes.shape[1] * 2
    if scale.numel() != scales_needed(codes.shape[0], -(-n_in // BLOCK), tiled=shuffle.tiled_scales):
        return f"unknown layout: weight_scale {list(scale.shape)} for codes {list(codes.shape)}, swizzled perhaps"
    return _Matrix(codes, n_in, " ".join(filter(None, (PACKED, shuffle.words))), scale, shuffle.tiled_scales)


def _fused(name: str, module: nn.Module, found: _Matrix | str) -> Iterator[HeldWeight | NotComparable]:
    if isinstance(found, str):
        yield NotComparable(name, found)
        return
    n_rows = found.stored.shape[0]
    sizes = held(module, "output_sizes")
    above, _, last = name.rpartition(".")
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2:
        names, sizes = (name,), (n_rows,)
    else:
        names = tuple(f"{above}.{part}".lstrip(".") for part in FUSED.get(last, ()))
    if len(names) != len(sizes) or sum(sizes) != n_rows:
        yield NotComparable(name, f"unknown layout: {len(sizes)} weights of {list(sizes)} rows in {n_rows}")
        return
    first = 0
    for each, size in zip(names, sizes):
        yield _held(each, found, size, RowMap(first), is_run=True)
        first += size


def _held(name: str, matrix: _Matrix, size: int, place: RowMap, *, is_run: bool) -> HeldWeight:
    """Describe a weight whose rows are stored at `place`; `is_run`: one after the other from `place.first` on."""
    device = matrix.stored.device

    def rows(index: torch.Tensor) -> torch.Tensor:
        return matrix.rows(place(index.to(device)))

    def columns(index: torch.Tensor) -> torch.Tensor:
        part = matrix.stored.detach().narrow(0, place.first, size)
        return part.index_select(1, index.to(device)).T.contiguous()

    can_turn = matrix.scale is None and is_run
    return HeldWeight(name, (size, matrix.n_in), matrix.layout, device, rows, columns if can_turn else None)


def _experts(
    name: str, module: nn.Module, parameters: dict[str, Any], numbers: list[int] | None
) -> Iterator[HeldWeight | NotComparable]:
    for parameter, parts in EXPERTS:
        found = _stack(module, parameter, parameters)
        if isinstance(found, str):
            yield NotComparable(name, found)
            continue
        matrices, shuffle = found
        if numbers is not None and len(numbers) != len(matrices):
            yield NotComparable(name, f"{len(matrices)} experts, where the map of their numbers has {len(numbers)}")
            continue
        size = matrices[0].stored.shape[0] // len(parts)
        for number, matrix in zip(numbers or range(len(matrices)), matrices):
            for i, part in enumerate(parts):
                place = shuffle.rows_of(i, len(parts), size)
                yield _held(f"{name}.{number}.{part}", matrix, size, place, is_run=shuffle is AS_LOADED)


def _as_trained(name: str, parameters: dict[str, Any], parts: list[Part]) -> Iterator[HeldWeight | NotComparable]:
    """Yield the experts of one parameter, as transformers serves what it trains."""
    if any(part.reading != CERTAIN for part in parts):
        readings = " or ".join(dict.fromkeys(part.reading for part in parts if part.reading != CERTAIN))
        yield NotComparable(name, f"unknown layout: experts stored {readings}")
        return
    for part in parts:
        stored = parameters[part.parameter]
        if not is_plain(stored) or stored.element_size() < 2:
            yield NotComparable(name, f"unknown layout: {part.parameter} is {kind_of(stored)}")
            continue
        words = ", ".join((STACKED, TURNED)) if part.is_turned else STACKED
        for expert, matrix in enumerate(stored.mT if part.is_turned else stored):
            found = _Matrix(matrix, matrix.shape[1], words)
            is_run = part.rows.every == 1
            yield _held(f"{name}.{expert}.{part.name}", found, part.size, part.rows, is_run=is_run)


def _stack(module: nn.Module, parameter: str, parameters: dict[str, Any]) -> tuple[list[_Matrix], Shuffle] | str:
    """Return one matrix for each expert."""
    stored, scale = parameters.get(parameter), parameters.get(f"{parameter}_scale")
    if not isinstance(stored, torch.Tensor) or stored.dim() != 3:
        return f"unknown layout: {parameter} is no stack of matrices"
    is_plain = stored.is_floating_point() and stored.element_size() > 1
    shuffle = experts_shuffle(module, packed=not is_plain)
    if isinstance(shuffle, str):
        return shuffle
    words = ", ".join(filter(None, (STACKED, "" if is_plain else PACKED, shuffle.words)))
    if is_plain:
        return [_Matrix(each, stored.shape[2], words) for each in stored], shuffle
    if stored.dtype is not torch.uint8 or scale is None or scale.element_size() != 1:
        return f"unknown layout: {parameter} is {kind_of(stored)}, with no scale of E8M0 exponents"
    n_experts, n_rows, n_in = stored.shape[0], stored.shape[1], stored.shape[2] * 2
    if scale.numel() != n_experts * scales_needed(n_rows, -(-n_in // BLOCK), tiled=shuffle.tiled_scales):
        return f"unknown layout: {parameter}_scale {list(scale.shape)} for codes {list(stored.shape)}"
    scales = scale.reshape(n_experts, -1)
    return [_Matrix(c, n_in, words, s, shuffle.tiled_scales) for c, s in zip(stored, scales)], shuffle


def decode_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Decode uint8 codes [F, K/2] (first element in the low nibble), exponents + 127 [F, K/32] to float32 [F, K]."""
    signed = (*E2M1_GRID, *(-value for value in E2M1_GRID))
    grid = torch.cat([torch.full((1,), value, device=codes.device) for value in signed])  # sent there, it would wait
    pairs = torch.stack([codes & 0xF, codes >> 4], -1).reshape(codes.shape[0], -1)
    values = grid[pairs.long()]
    scales = torch.exp2(exponents.float() - 127.0).repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values * scales
