# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Log-probability of the taken token and entropy from logits [n, V], each read once and none held in float32.

    m = max z,  S = sum exp(z - m),  T = sum (z - m) exp(z - m)        z = logits / temperature
    log p(t) = z_t - m - log S                                         H = log S - T / S

in one pass: where a chunk raises m by d, S and T become S exp(-d) and (T - d S) exp(-d). torch takes six passes over
float32 copies. A masked token (-inf) has no part in either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 2048
LOWEST = tl.constexpr(-3.0e38)
"""In place of -inf, whose difference with itself is NaN."""


@triton.jit
def token_kernel(
    logits_ptr,
    tokens_ptr,
    log_prob_ptr,
    entropy_ptr,
    width,
    stride_row,
    stride_column,
    temperature,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride_row
    index = tl.arange(0, CHUNK)
    top = LOWEST
    weight = 0.0
    weighted = 0.0
    for begin in range(0, width, CHUNK):
        columns = begin + index
        raw = tl.load(base + columns.to(tl.int64) * stride_column, mask=columns < width, other=float("-inf"))
        z = tl.maximum(raw.to(tl.float32) / temperature, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        above = tl.maximum(top, tl.max(z, 0))
        fade = tl.exp(top - above)
        weighted = (weighted + tl.where(weight > 0, (top - above) * weight, 0.0)) * fade
        weight *= fade
        below = tl.maximum(z - above, -1.0e4, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp(below)
        weight += tl.sum(p, 0)
        weighted += tl.sum(below * p, 0)
        top = above
    taken = tl.load(base + tl.load(tokens_ptr + row) * stride_column).to(tl.float32) / temperature
    tl.store(log_prob_ptr + row, taken - top - tl.log(weight))
    tl.store(entropy_ptr + row, tl.log(weight) - weighted / weight)


@torch.no_grad()
def token_statistics(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fields of `policy.TokenStatistics`, within a few float32 roundings. Never synchronises."""
    n, width = logits.shape
    log_prob = torch.empty(n, dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(log_prob)
    if n:
        token_kernel[(n,)](
            *(logits, tokens, log_prob, entropy, width, *logits.stride(), float(temperature)),
            CHUNK=min(CHUNK, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return log_prob, entropy
