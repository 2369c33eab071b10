"""Log-probabilities of rollout and trainer, token by token, from the model's own tensors: rows of table `rollouts`.

    d = log p_rollout(token) - log p_train(token)        both at the temperature of the generation

p_rollout is the softmax of what the lm_head returned in generation; p_train that of the lm_head's output in the
training forward of the same sequence or, where a fused loss reads its weight instead of calling it, of
norm output x weight^T. Top-k, top-p and penalties are in neither. Sequences are matched by their tokens, within one
optimizer step, so that the weights are the same on both sides unless the run makes them differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mxprobe.measuring.tokens.generation import Generation, measured_positions
from mxprobe.measuring.tokens.matching import Match, match
from mxprobe.measuring.tokens.mismatch import Pairs
from mxprobe_kernels.policy import TokenStatistics, token_statistics

_CHUNK_TOKENS = 256


class Scored(NamedTuple):
    """A generation under the training forward of one micro batch."""

    match: Match
    statistics: TokenStatistics
    """[S * n]"""
    dtype: torch.dtype
    """Of the tensor that they were read from."""
    advantage: torch.Tensor | None = None
    """[S]: of the row of the micro batch that each sequence was found in; None where not known."""


def score_hidden(
    generation: Generation, ids: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Scored:
    """ids int64 [B, T], hidden [B, T, H] the input of the lm_head, weight [V, H]."""
    found = match(generation, ids)
    row, position, tokens = _predictors(generation, found, hidden.shape[1])
    x = hidden.detach()[row, position].to(weight.dtype)
    parts = [
        token_statistics(F.linear(part, weight, bias), chosen, generation.sampling.temperature)
        for part, chosen in zip(x.split(_CHUNK_TOKENS), tokens.split(_CHUNK_TOKENS))
    ]
    return Scored(found, TokenStatistics(*(torch.cat(values) for values in zip(*parts))), hidden.dtype)


def score_logits(generation: Generation, ids: torch.Tensor, logits: torch.Tensor) -> Scored:
    """ids int64 [B, T], logits [B, T', V] of the last T' positions."""
    found = match(generation, ids)
    row, position, tokens = _predictors(generation, found, ids.shape[1])
    position = (position - (ids.shape[1] - logits.shape[1])).clamp(min=0)
    parts = [
        token_statistics(logits.detach()[r, p], chosen, generation.sampling.temperature)
        for r, p, chosen in zip(*(each.split(_CHUNK_TOKENS) for each in (row, position, tokens)))
    ]
    return Scored(found, TokenStatistics(*(torch.cat(values) for values in zip(*parts))), logits.dtype)


def _predictors(generation: Generation, found: Match, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[S * n] each: rows and positions whose logits predict the measured tokens, and the tokens."""
    at = measured_positions(len(generation.tokens), found.row.device)
    position = (found.start[:, None] + at - 1).clamp(0, length - 1)
    tokens = torch.stack(generation.tokens, 1).index_select(1, at)
    return found.row[:, None].expand_as(position).reshape(-1), position.reshape(-1), tokens.reshape(-1)


def compute_dtype(generation: Generation, scored: Sequence[Scored]) -> str:
    """The coarsest dtype that the log-probabilities of either side have passed through: `bfloat16`, `float32`, ..."""
    seen = [each.dtype for each in scored]
    if generation.dtype is not None:
        seen.append(generation.dtype)
    return str(max(seen, key=lambda dtype: torch.finfo(dtype).eps)).replace("torch.", "")


def counted_tokens(generation: Generation, found: torch.Tensor) -> torch.Tensor:
    """bool [S, n] on the CPU: measured positions before each sequence's end, of the sequences found (bool [S])."""
    at = measured_positions(len(generation.tokens), torch.device("cpu"))
    return (at < generation.lengths().cpu()[:, None]) & found.cpu()[:, None]


def pair_up(generation: Generation, scored: Sequence[Scored], flipped: torch.Tensor | None = None) -> Pairs:
    """Tokens seen on both sides, up to each sequence's end. Reads the device: the worker's business.

    `flipped` bool [S, n]: what is to be told of the measured positions beside.
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
