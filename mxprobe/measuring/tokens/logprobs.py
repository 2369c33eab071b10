"""Log-probabilities of rollout and trainer, token by token, from the model's own tensors: rows of table `rollouts`.

    d = log p_rollout(token) - log p_train(token)        both at the temperature of the generation

p_rollout is the softmax of what the lm_head returned in generation; p_train that of the lm_head's output in the
training forward of the same sequence or, where a fused loss reads its weight instead of calling it, of
norm output x weight^T. Top-k, top-p and penalties are in neither. Sequences are matched by their tokens, within one
optimizer step, so that the weights are the same on both sides unless the run makes them differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mxprobe.measuring.tokens.generation import Generation, measured_positions
from mxprobe.measuring.tokens.matching import Match, match
from mxprobe.measuring.tokens.mismatch import Pairs, coarsest
from mxprobe_kernels.policy import TokenStatistics, token_statistics

_CHUNK_TOKENS = 256


class Scored(NamedTuple):
    """A generation under the training forward of one micro batch."""

    match: Match
    statistics: TokenStatistics
    """[S * n]"""
    dtype: torch.dtype
    """dtype of the tensor that they were read from."""
    advantage: torch.Tensor | None = None
    """[S] of the row of the micro batch that each sequence was found in; None where not known."""


def score_hidden(
    generation: Generation, ids: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Scored:
    """Score from hidden [B, T, H], the input of the lm_head, and its weight [V, H]; ids int64 [B, T]."""
    found = match(generation, ids)
    row, position, tokens = _predictors(generation, found, hidden.shape[1])
    x = hidden.detach()[row, position].to(weight.dtype)
    logits = (F.linear(part, weight, bias) for part in x.split(_CHUNK_TOKENS))
    return Scored(found, _statistics(logits, tokens, generation), hidden.dtype)


def score_logits(generation: Generation, ids: torch.Tensor, logits: torch.Tensor) -> Scored:
    """Score from logits [B, T', V] of the last T' positions; ids int64 [B, T]."""
    found = match(generation, ids)
    row, position, tokens = _predictors(generation, found, ids.shape[1])
    position = (position - (ids.shape[1] - logits.shape[1])).clamp(min=0)
    parts = (logits.detach()[r, p] for r, p in zip(row.split(_CHUNK_TOKENS), position.split(_CHUNK_TOKENS)))
    return Scored(found, _statistics(parts, tokens, generation), logits.dtype)


def _statistics(logits: Iterable[torch.Tensor], tokens: torch.Tensor, generation: Generation) -> TokenStatistics:
    """Return the statistics of tokens [S * n] from logits that come `_CHUNK_TOKENS` rows at a time."""
    temperature = generation.sampling.temperature
    parts = [token_statistics(each, chosen, temperature) for each, chosen in zip(logits, tokens.split(_CHUNK_TOKENS))]
    return TokenStatistics(*(torch.cat(values) for values in zip(*parts)))


def _predictors(generation: Generation, found: Match, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [S * n] each: rows and positions whose logits predict the measured tokens, and the tokens."""
    at = measured_positions(len(generation.tokens), found.row.device)
    position = (found.start[:, None] + at - 1).clamp(0, length - 1)
    tokens = torch.stack(generation.tokens, 1).index_select(1, at)
    return found.row[:, None].expand_as(position).reshape(-1), position.reshape(-1), tokens.reshape(-1)


def compute_dtype(generation: Generation, scored: Sequence[Scored]) -> str:
    """Name the coarsest dtype that the log-probabilities of either side have passed through."""
    return coarsest([generation.dtype, *(each.dtype for each in scored)])


def counted_tokens(generation: Generation, found: torch.Tensor) -> torch.Tensor:
    """Return bool [S, n] on the CPU: measured positions before each sequence's end, of the sequences found."""
    at = measured_positions(len(generation.tokens), torch.device("cpu"))
    return (at < generation.lengths().cpu()[:, None]) & found.cpu()[:, None]


def pair_up(generation: Generation, scored: Sequence[Scored], flipped: torch.Tensor | None = None) -> Pairs:
    """Pair the tokens seen on both sides, up to each sequence's end. Reads the device: the worker's business.

    `flipped` bool [S, n]: measured positions that routers sent to other experts.
    """
    rollout = TokenStatistics(*(torch.stack(each, 1).cpu().double() for each in zip(*generation.statistics)))
    shape = rollout.log_prob.shape
    log_prob, entropy = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    matched = torch.zeros(shape[0], dtype=torch.bool)
    advantage = torch.full((shape[0],), float("nan"), dtype=torch.float64)
    for each in scored:
        new = each.match.found.cpu() & ~matched
        log_prob[new] = each.statistics.log_prob.cpu().double().reshape(shape)[new]
        entropy[new] = each.statistics.entropy.cpu().double().reshape(shape)[new]
        if each.advantage is not None:
            advantage[new] = each.advantage.cpu().double()[new]
        matched |= new
    at = measured_positions(len(generation.tokens), torch.device("cpu"))
    lengths = generation.lengths().cpu()[:, None]
    counted = counted_tokens(generation, matched)
    known = bool(advantage[matched].isfinite().any())
    return Pairs(
        rollout.log_prob[counted],
        log_prob[counted],
        int(matched.sum()),
        int((~matched).sum()),
        rollout.entropy[counted],
        entropy[counted],
        advantage[:, None].expand(shape)[counted] if known else None,
        at.expand(shape)[counted],
        lengths.expand(shape)[counted],
        flipped=None if flipped is None else flipped.cpu()[counted],
    )
