"""The three GEMMs of a layer as copied, E matrices of each kind; a Linear is a stack of one.

| GEMM             | operands     | blocks along | A                | B            |
|------------------|--------------|--------------|------------------|--------------|
| forward Y = XW^T | x_fwd        | in-features  | X [R, K]         | W^T [K, O_s] |
|                  | w_fwd        | in-features  | W [O_s, K]       | X^T [K, R]   |
| dgrad dX = GW    | g_dgrad      | out-features | G [R, O]         | W [O, K_s]   |
|                  | w_dgrad      | out-features | W^T [K_s, O]     | G^T [O, R]   |
| wgrad dW = G^TX  | g_wgrad      | tokens       | G^T [O_s, R]     | X [R, K_s]   |
|                  | x_wgrad      | tokens       | X^T [K_s, R]     | G [R, O_s]   |

Where there are more than `max_rows`, R is a sample: of single rows, the largest always among them and the others
weighted for it, but of whole 32-token tiles for wgrad, where a tile's rows share their blocks. Padding tokens are not
known in a Linear and are counted like any other. G is the gradient of the first micro batch of the step.

Each expert is taken with its own tokens: blocks along tokens begin again at each. An expert that was sent no token
multiplies nothing and is left out, its weight too. Rows of zeros, with which some engines fill an expert's part up to
a multiple of their tile, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mxprobe.measuring.adapters.placement import WHOLE, Placement
from mxprobe.measuring.operands.operand import Operand
from mxprobe.measuring.recipes import Call
from mxprobe.measuring.sampling import Rows, take
from mxprobe.schema import Role


class Sample(NamedTuple):
    """Rows of X or of G that were copied, and how much of all they are."""

    rows: torch.Tensor
    """[E, R, C]"""
    sampled_frac: float
    n_clusters: int
    singles: Rows | None = None
    """Which single rows they are, where these stand for all by their weights; None where all count 1."""

    @property
    def share(self) -> tuple[float, int, int, float]:
        """The fields of an `Operand` after its matrices: sampled_frac, n_clusters, n_certain, certain_weight."""
        if self.singles is None:
            return self.sampled_frac, self.n_clusters, 0, 1.0
        return self.sampled_frac, self.singles.n_effective, self.singles.n_certain, 1 / self.singles.drawn_weight

    @property
    def counted(self) -> torch.Tensor:
        """The rows as large as their weights make them in a sum of squares over rows."""
        if self.singles is None:
            return self.rows
        weights = self.singles.weights() / self.singles.drawn_weight
        return self.rows.double() * weights.sqrt()[:, None]


class Experts(NamedTuple):
    """The experts of a stack: those measured that were sent a token, in the order of its matrices."""

    numbers: list[int]
    """Their numbers in the whole model."""
    rows: list[int]
    """Tokens each was sent."""
    n_experts: int
    """How many the module holds."""
    n_called: int
    """How many of these were sent a token."""

    @property
    def n_one_token(self) -> int:
        """How many of those measured were sent one token."""
        return sum(n == 1 for n in self.rows)


@dataclass
class Stack:
    """What was copied of a layer: R rows that stand for all, T rows of whole tiles; _s = sampled features."""

    x: Sample
    """[E, R, K]"""
    g: Sample | None
    """[E, R_g, O]; None where there is no gradient."""
    x_tiles: Sample
    """[E, T, K]"""
    g_tiles: Sample | None
    """[E, T_g, O]"""
    y: torch.Tensor | None
    """[E, R, O_s], the bias taken off; None where it is not visible."""
    y_dtype: torch.dtype
    """In which y was returned."""
    w_rows: torch.Tensor
    """[E, O_s, K]"""
    w_columns: torch.Tensor
    """[E, O, K_s]"""
    out_index: torch.Tensor | None
    """int64 [O_s]; None for all."""
    in_index: torch.Tensor | None
    """int64 [K_s]; None for all."""
    weight_share: float = 1.0
    """Share of the matrices called that are measured."""
    there: torch.Tensor | None = None
    """bool [E, R]: a token, neither missing nor padding; None where all rows are."""
    y_weights: torch.Tensor | None = None
    """float64 [R]: what each row of y counts; None where all count 1."""
    has_same_tokens: bool = True
    """G has the tokens of X: dW is the product of the two. Where not:"""
    x_of_g: torch.Tensor | None = None
    """[E, T_g, K]: X at the rows of `g_tiles`; None where they are on another rank."""
    g_of_x: torch.Tensor | None = None
    """[E, T, O]: G at the rows of `x_tiles`; None where they are on another rank."""
    experts: Experts | None = None
    """None for a Linear."""
    placement: Placement = WHOLE

    @property
    def n_rows(self) -> int:
        """How many rows of X are measured; for experts these are its clusters."""
        return self.x.rows.shape[1] if self.experts is None else self.x.n_clusters

    def call(self, i: int) -> Call:
        """Return the forward call of one matrix."""
        assert self.y is not None  # only outputs that are visible are judged
        rows = slice(None) if self.there is None else self.there[i]
        return Call(self.x.rows[i][rows], self.w_rows[i], self.y[i][rows], self.y_dtype, self.y_weights)

    def operands(self, *, with_weights: bool) -> Iterator[Operand]:
        """Yield the operands that the stack holds, each with the matrices it meets."""
        by_row = by_token = always = None
        if self.there is not None:
            by_row, by_token = self.there[:, :, None], self.there[:, None, :]
            always = self.there.new_ones(1, 1, 1)
        w, columns, x, g = self.w_rows, self.w_columns, self.x, self.g
        has_rows = x.rows.shape[1] > 0  # not those of a weight that was copied alone
        if has_rows:
            yield Operand(Role.X_FWD, x.rows, w.mT, *x.share, there=by_row)
        if with_weights:
            share = w.shape[1] / columns.shape[1] * self.weight_share, len(w) * w.shape[1]
            yield Operand(Role.W_FWD, w, x.counted.mT, *share, there=always)
        if g is None or self.g_tiles is None:
            return
        if has_rows:
            yield Operand(Role.G_DGRAD, g.rows, columns, *g.share, there=by_row)
        if with_weights:
            share = columns.shape[2] / w.shape[2] * self.weight_share, len(w) * columns.shape[2]
            yield Operand(Role.W_DGRAD, columns.mT, g.counted.mT, *share, there=always)
        if has_rows:
            g_s, x_s = _features(self.g_tiles.rows, self.out_index), _features(self.x_tiles.rows, self.in_index)
            x_of_g, g_of_x = x_s, g_s
            if not self.has_same_tokens:
                x_of_g, g_of_x = _met(self.x_of_g, self.in_index, g_s), _met(self.g_of_x, self.out_index, x_s)
            yield Operand(Role.G_WGRAD, g_s.mT, x_of_g, *self.g_tiles.share, there=by_token)
            yield Operand(Role.X_WGRAD, x_s.mT, g_of_x, *self.x_tiles.share, there=by_token)


def _features(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return rows if index is None else take(rows, index, dim=2)


def _met(other: torch.Tensor | None, index: torch.Tensor | None, operand: torch.Tensor) -> torch.Tensor:
    """Return the rows that an operand meets in the weight gradient.

    Where they are on another rank it is a column of zeros, which adds nothing to any sum.
    """
    return operand.new_zeros(*operand.shape[:2], 1) if other is None else _features(other, index)
