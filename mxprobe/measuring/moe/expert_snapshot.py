"""Copies of the GEMMs that one forward makes by a parameter of several experts; taken in the training thread.

E = experts, E_s = those measured, S = rows sent to experts, R = rows copied of each (padded with zeros), K = in
features, O = out features; _s = sampled. Shapes are known without the device: nothing waits for how many rows an
expert was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mxprobe.measuring.moe.gemm import Gemm
from mxprobe.measuring.operands.snapshot import Moment, event_now
from mxprobe.measuring.operands.stack import Experts, Sample, Stack
from mxprobe.measuring.sampling import TILE, sample_tiles, take

CPU_ROWS, DEVICE_ROWS = 256, 1 << 14
"""How many rows of one GEMM are copied, over all experts."""
CPU_FEATURES, DEVICE_FEATURES = 64, 512
"""Output features (and input features, for the backward products) copied of each expert: on a CPU the experts
of a layer cost about what a Linear does."""
CPU_ELEMENTS, DEVICE_ELEMENTS = 1 << 19, 1 << 22
"""Elements of one copied operand; experts that do not fit take turns."""


class Layout(NamedTuple):
    """What is copied of the GEMMs by one parameter in one forward."""

    n_experts: int
    experts: tuple[int, ...]
    """Those measured, ascending."""
    rows: int
    """R, whole tiles."""
    out_index: torch.Tensor | None
    """[O_s]; None for all."""
    in_index: torch.Tensor | None
    """[K_s]"""
    seed: int
    first: int = 0
    """Number in the whole model of the first of the E experts of this rank."""

    @classmethod
    def plan(cls, weight: torch.Tensor, *, every: bool, seed: int, elements: int, first: int = 0) -> Layout:
        """Choose what is copied for weight [E, O, K].

        `every` takes all experts, whatever they cost; `elements` is the most that one copied operand has.
        """
        n_experts, out_features, in_features = weight.shape
        device = weight.device
        is_cpu = device.type == "cpu"
        n_rows = CPU_ROWS if is_cpu else DEVICE_ROWS
        widest = max(out_features, in_features)
        fitting = min(n_rows // TILE, max(elements // (TILE * widest), 1))
        n = n_experts if every else min(n_experts, fitting)
        tiles = max(min(n_rows // TILE // n, elements // (TILE * widest * n)), 1)
        generator = torch.Generator().manual_seed(seed)
        experts = torch.randperm(n_experts, generator=generator)[:n].sort().values.tolist()
        most = CPU_FEATURES if is_cpu else DEVICE_FEATURES
        limit = max(min(elements // (n * max(in_features, 1)), most), TILE)
        limit_in = max(min(elements // (n * max(out_features, 1)), most), TILE)
        return cls(
            n_experts=n_experts,
            experts=tuple(experts),
            rows=tiles * TILE,
            out_index=sample_tiles(out_features, limit, seed=seed, device=device),
            in_index=sample_tiles(in_features, limit_in, seed=seed + 1, device=device),
            seed=seed,
            first=first,
        )


@dataclass
class Piece:
    """One GEMM's rows, for the experts that are measured: E_p of them, one where the run loops over experts."""

    experts: tuple[int, ...]
    """By their number on this rank."""
    counts: torch.Tensor
    """int64 [E_p]: rows each was sent."""
    index: torch.Tensor
    """int64 [E_p R] into the S rows."""
    valid: torch.Tensor
    """bool [E_p, R]"""
    x: torch.Tensor
    """[E_p, R, K]"""
    y: torch.Tensor
    """[E_p, R, O_s], with the bias."""
    weight_rows: torch.Tensor
    """[E_p, O_s, K]"""
    weight_columns: torch.Tensor
    """[E_p, O, K_s]"""
    bias: torch.Tensor | None
    """[E_p, O_s], or None."""
    gradient: torch.Tensor | None = None
    """[E_p, R, O]"""

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Copy the rows of the gradient [S, O] of the loss by the GEMM's output."""
        self.gradient = _pick(gradient, self.index, self.valid)


@dataclass
class ExpertsSnapshot(Moment):
    """One parameter, one phase, one probed step; the gradients arrive with the backward pass.

    `module`: the module's name and the parameter's.
    """

    with_operands: bool = False
    with_weights: bool = False
    layout: Layout | None = None
    """None until the first GEMM."""
    pieces: list[Piece] = field(default_factory=list)
    n_rows: int = 0
    """S, over all experts."""
    n_seen: int = 0
    """Experts that were called, where the run loops over them."""
    all_counts: torch.Tensor | None = None
    """int64 [E]: rows of each expert, where one call had them all."""
    dtype: torch.dtype = torch.float32
    """In which y was returned."""
    ready: Any = None
    """CUDA event after which the copies hold their values; None on the CPU."""

    @property
    def x(self) -> torch.Tensor:
        """One of the copies: it tells the device."""
        return self.pieces[0].x

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Copy the gradient of the loss by what a single call over all experts returned, [..., O]."""
        for piece in self.pieces:
            piece.add_gradient(gradient.reshape(-1, gradient.shape[-1]))

    def mark_ready(self) -> None:
        """Record, without waiting, the point of the current CUDA stream at which the copies are complete."""
        self.ready = event_now(self.x.device)

    def stack(self) -> Stack | None:
        """Return the pieces as one tensor per operand; None where no expert measured was sent a token.

        Copies from the device what says how many rows there are: in the thread that measures.
        """
        pieces, layout = self.pieces, self.layout
        numbers = [expert for piece in pieces for expert in piece.experts]
        counts = torch.cat([piece.counts for piece in pieces]).tolist() if pieces else []
        kept = [i for i, n in enumerate(counts) if n]
        if layout is None or not kept:
            return None
        index = torch.tensor(kept, device=self.x.device)

        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            return whole if len(kept) == len(whole) else whole.index_select(0, index)

        x, y = joined([p.x for p in pieces]), joined([p.y for p in pieces])
        biases = [p.bias for p in pieces if p.bias is not None]
        gradients = [p.gradient for p in pieces if p.gradient is not None]
        g = joined(gradients) if len(gradients) == len(pieces) else None
        there = joined([p.valid for p in pieces]) & (x != 0).any(-1)
        measured, every = there.sum(1), self.all_counts
        n_rows, n_tiles = int(measured.sum()), int(((measured + TILE - 1) // TILE).sum())
        n_called = self.n_seen if every is None else int((every > 0).sum())
        sampled_frac = n_rows / max(self.n_rows if every is None else int(every.sum()), 1)
        return Stack(
            x=Sample(x, sampled_frac, n_rows),
            g=None if g is None else Sample(g, sampled_frac, n_rows),
            x_tiles=Sample(x, sampled_frac, n_tiles),
            g_tiles=None if g is None else Sample(g, sampled_frac, n_tiles),
            y=y if not biases else y.double() - joined(biases).double()[:, None, :],
            y_dtype=self.dtype,
            w_rows=joined([p.weight_rows for p in pieces]),
            w_columns=joined([p.weight_columns for p in pieces]),
            out_index=layout.out_index,
            in_index=layout.in_index,
            weight_share=len(kept) / max(n_called, 1),
            there=there,
            experts=Experts(
                [layout.first + numbers[i] for i in kept], [counts[i] for i in kept], layout.n_experts, n_called
            ),
        )


def copy_gemm(
    gemm: Gemm,
    layout: Layout,
    weight: torch.Tensor | Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
) -> tuple[Piece, torch.Tensor | None] | None:
    """Return the copies, and the rows of each expert (int64 [E]) where the call had them all.

    None where no expert of the call is measured. weight [E, O, K], or E of [O, K], is the parameter's own, whatever
    copy of it the GEMM was given; `biases` are E of [O] that y contains, beside the one of `gemm`.
    """
    device = gemm.x.device
    if gemm.expert is not None:
        if gemm.expert not in layout.experts or not gemm.x.shape[0]:
            return None
        experts: tuple[int, ...] = (gemm.expert,)
        counts = torch.full((1,), gemm.x.shape[0], dtype=torch.int64, device=device)
        every, starts, order = None, torch.zeros_like(counts), None
        w, chosen = weight[gemm.expert : gemm.expert + 1], None
    else:
        experts = layout.experts
        chosen = on_device(experts, device)
        every, order = _counts(gemm, layout.n_experts)
        counts = every.index_select(0, chosen)
        starts = (every.cumsum(0) - every).index_select(0, chosen)
        w = weight
    index, valid = _rows(counts, starts, layout)
    index = index.clamp(max=max(gemm.x.shape[0] - 1, 0)).reshape(-1)
    if order is not None:
        index = order.index_select(0, index)
    y = gemm.rows_of(gemm.output.detach())
    bias = gemm.bias
    if bias is not None:
        bias = take(bias, layout.out_index).expand(len(experts), -1)
    elif biases:
        bias = torch.stack([take(biases[e], layout.out_index) for e in experts])
    if isinstance(w, torch.Tensor):
        weight_rows, weight_columns = _cut(w, chosen, layout.out_index, dim=1), _cut(w, chosen, layout.in_index, dim=2)
    else:
        weight_rows = torch.stack([take(w[e], layout.out_index) for e in experts])
        weight_columns = torch.stack([take(w[e], layout.in_index, dim=1) for e in experts])
    piece = Piece(
        experts=experts,
        counts=counts,
        index=index,
        valid=valid,
        x=_pick(gemm.x, index, valid),
        y=_pick(y if layout.out_index is None else y.index_select(1, layout.out_index), index, valid),
        weight_rows=weight_rows,
        weight_columns=weight_columns,
        bias=bias,
    )
    return piece, every


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 written by kernels: a copy from the host's memory would wait for all that the device is at."""
    return torch.cat([torch.full((1,), each, dtype=torch.int64, device=device) for each in numbers])


def _cut(weight: torch.Tensor, chosen: torch.Tensor | None, index: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Copy W [E, O, K] of the chosen experts at the chosen features of `dim`; no whole matrix where some do."""
    if chosen is None:
        return take(weight, index, dim)
    if index is None:
        return weight.detach().index_select(0, chosen)
    at = chosen[:, None], index
    return weight.detach()[at] if dim == 1 else weight.detach().mT[at].mT.contiguous()


def _counts(gemm: Gemm, n_experts: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of each expert, int64 [E], and the order that sorts the rows by expert; None where they are sorted."""
    if gemm.experts is not None:
        every = (gemm.experts[None, :] == torch.arange(n_experts, device=gemm.x.device)[:, None]).sum(1)
        return every, gemm.experts.argsort(stable=True)
    if gemm.offsets is not None:
        ends = gemm.offsets.to(torch.int64)
        return torch.diff(ends, prepend=ends.new_zeros(1)), None
    return torch.full((n_experts,), gemm.x.shape[0] // n_experts, device=gemm.x.device), None


def _rows(counts: torch.Tensor, starts: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [E_p, R] rows to copy of each expert and bool [E_p, R]: is there such a row.

    All of them where R are enough, the short last tile too; else whole tiles of the expert's own rows, evenly spaced
    from a random place: a block along tokens starts again at each expert.
    """
    generator = torch.Generator(device=counts.device)
    generator.manual_seed(layout.seed)
    n_tiles = layout.rows // TILE
    phase = torch.rand(len(counts), 1, generator=generator, device=counts.device)
    tile = torch.arange(n_tiles, device=counts.device)
    spread = ((tile + phase) * (counts // TILE)[:, None] / n_tiles).floor().to(torch.int64)
    sampled = (spread[..., None] * TILE + torch.arange(TILE, device=counts.device)).reshape(len(counts), -1)
    every = torch.arange(layout.rows, device=counts.device).expand(len(counts), -1)
    few = (counts <= layout.rows)[:, None]
    return torch.where(few, every, sampled) + starts[:, None], ~few | (every < counts[:, None])


def _pick(rows: torch.Tensor, index: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """rows [S, C] -> [E_p, R, C], zeros where there is no such row."""
    if not rows.shape[0]:
        return rows.new_zeros((*valid.shape, rows.shape[-1]))
    picked = rows.detach().index_select(0, index).reshape(*valid.shape, rows.shape[-1])
    return picked.masked_fill_(~valid[..., None], 0.0)
