"""Log-probabilities of rollout and trainer, token by token, from the model's own tensors: rows of table `rollouts`.

    d = log p_rollout(token) - log p_train(token)        both at the temperature of the generation

p_rollout is the softmax of what the lm_head returned in generation; p_train that of the lm_head's output in the
training forward of the same sequence or, where a fused loss reads its weight instead of calling it, of
norm output x weight^T. Top-k, top-p and penalties are in neither. Sequences are matched by their tokens, within one
optimizer step, so that the weights are the same on both sides unless the run makes them differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mxprobe.agent.generation import Generation, TokenStatistics, measured_positions, statistics
from mxprobe.agent.matching import Match, match

CLIP_EPSILON = 0.2
"""A token counts as outside the clip range where p_train / p_rollout is not within 1 -+ this."""
MIN_TOKENS = 4
_CHUNK_TOKENS = 256
ALL = "all"
STRATA = ("entropy_q1", "entropy_q2", "entropy_q3", "entropy_q4")

Row = dict[str, Any]


class Scored(NamedTuple):
    """A generation under the training forward of one micro batch."""

    match: Match
    statistics: TokenStatistics
    """[S * n]"""
    dtype: torch.dtype
    """Of the tensor that they were read from."""


def score_hidden(
    generation: Generation, ids: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Scored:
    """ids int64 [B, T], hidden [B, T, H] the input of the lm_head, weight [V, H]."""
    found = match(generation, ids)
    row, position, tokens = _predictors(generation, found, hidden.shape[1])
    x = hidden.detach()[row, position].to(weight.dtype)
    parts = [
        statistics(F.linear(part, weight, bias), chosen, generation.sampling.temperature)
        for part, chosen in zip(x.split(_CHUNK_TOKENS), tokens.split(_CHUNK_TOKENS))
    ]
    return Scored(found, TokenStatistics(*(torch.cat(values) for values in zip(*parts))), hidden.dtype)


def score_logits(generation: Generation, ids: torch.Tensor, logits: torch.Tensor) -> Scored:
    """ids int64 [B, T], logits [B, T', V] of the last T' positions."""
    found = match(generation, ids)
    row, position, tokens = _predictors(generation, found, ids.shape[1])
    position = (position - (ids.shape[1] - logits.shape[1])).clamp(min=0)
    parts = [
        statistics(logits.detach()[r, p], chosen, generation.sampling.temperature)
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


class Pairs(NamedTuple):
    """Matched tokens of one step, on the CPU, float64 [n]."""

    log_prob_rollout: torch.Tensor
    log_prob_train: torch.Tensor
    entropy_rollout: torch.Tensor
    entropy_train: torch.Tensor
    n_sequences: int
    n_unmatched: int
    """Sequences looked for and not found in a training batch of the step."""


def pair_up(generation: Generation, scored: Sequence[Scored]) -> Pairs:
    """Tokens seen on both sides, up to each sequence's end. Reads the device: the worker's business."""
    rollout = TokenStatistics(*(torch.stack(each, 1).cpu().double() for each in zip(*generation.statistics)))
    shape = rollout.log_prob.shape
    log_prob, entropy = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    matched = torch.zeros(shape[0], dtype=torch.bool)
    for each in scored:
        new = each.match.found.cpu() & ~matched
        log_prob[new] = each.statistics.log_prob.cpu().double().reshape(shape)[new]
        entropy[new] = each.statistics.entropy.cpu().double().reshape(shape)[new]
        matched |= new
    at = measured_positions(len(generation.tokens), torch.device("cpu"))
    within = at < generation.lengths().cpu()[:, None]
    counted = within & matched[:, None]
    return Pairs(
        rollout.log_prob[counted],
        log_prob[counted],
        rollout.entropy[counted],
        entropy[counted],
        int(matched.sum()),
        int((~matched).sum()),
    )


def rollout_rows(pairs: Pairs) -> Iterator[Row]:
    """Rows of table `rollouts` without when and temperature: all tokens, then quarters by the rollout's entropy."""
    n = len(pairs.log_prob_rollout)
    yield _sums(pairs, ALL, torch.arange(n))
    order = pairs.entropy_rollout.argsort(stable=True)
    if n >= MIN_TOKENS * len(STRATA):
        for stratum, index in zip(STRATA, torch.tensor_split(order, len(STRATA))):
            yield _sums(pairs, stratum, index)


def _sums(pairs: Pairs, stratum: str, index: torch.Tensor) -> Row:
    d = (pairs.log_prob_rollout - pairs.log_prob_train)[index]
    w = (-d).exp()
    return {
        "stratum": stratum,
        "n_sequences": pairs.n_sequences,
        "n_unmatched": pairs.n_unmatched,
        "n_tokens": len(d),
        "sum_d": float(d.sum()),
        "sum_abs_d": float(d.abs().sum()),
        "sum_d2": float(d.square().sum()),
        "max_abs_d": float(d.abs().max()) if len(d) else 0.0,
        "sum_k3": float((w - 1.0 + d).sum()),
        "sum_w": float(w.sum()),
        "sum_w2": float(w.square().sum()),
        "n_outside_clip": int(((w < 1.0 - CLIP_EPSILON) | (w > 1.0 + CLIP_EPSILON)).sum()),
        "sum_entropy_rollout": float(pairs.entropy_rollout[index].sum()),
        "sum_entropy_train": float(pairs.entropy_train[index].sum()),
    }


def signal_values(row: Row) -> list[tuple[str, str, str, float]]:
    """(key, canonical metric, estimator, value) of the row of all tokens, for table `signals`."""
    n = row["n_tokens"]
    return [
        ("mxprobe/mismatch_k1", "mismatch_kl", "k1", row["sum_d"] / n),
        ("mxprobe/mismatch_k3", "mismatch_kl", "k3", row["sum_k3"] / n),
        ("mxprobe/mismatch_abs_dlogp", "mismatch_logp_abs_mean", "abs_dlogp", row["sum_abs_d"] / n),
        ("mxprobe/mismatch_ess", "mismatch_ess", "", row["sum_w"] ** 2 / (n * row["sum_w2"])),
        ("mxprobe/entropy", "entropy", "", row["sum_entropy_train"] / n),
    ]
