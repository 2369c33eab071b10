"""What a policy says, from its logits [n, V]: log-probabilities of tokens, entropies, exact divergences. Shipped.

    log p(t) = z_t - log sum exp z        z = logits / temperature, in float32
    H(p)     = -sum p log p
    KL(p|q)  = sum p (log p - log q)

A few rows at a time: no float32 copy of all logits is made. Never synchronises, touches no random state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxprobe_kernels.frontend import has_triton

CHUNK_ELEMENTS = 1 << 22
"""Logits that are held in float32 at one time (16 MiB)."""


class TokenStatistics(NamedTuple):
    log_prob: torch.Tensor
    """Log-probabilities of the tokens taken, float32 [n], at the temperature."""
    entropy: torch.Tensor
    """Entropies in nats, float32 [n]."""


@torch.no_grad()
def token_statistics(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, *, chunk_elements: int = CHUNK_ELEMENTS
) -> TokenStatistics:
    """Return log p(token) and H(p) from logits [n, V] of any floating dtype and tokens, int64 [n].

    Triton takes one pass on a GPU, where it is installed and the logits are not float64. The chunk changes no result.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and has_triton():
        from mxprobe_kernels import triton_policy

        return TokenStatistics(*triton_policy.token_statistics(logits, tokens, temperature))
    rows = max(chunk_elements // max(logits.shape[1], 1), 1)
    log_prob = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(log_prob)
    for begin in range(0, len(logits), rows):
        part = slice(begin, begin + rows)
        log_p = torch.log_softmax(logits[part].float() / temperature, -1)
        log_prob[part] = log_p.gather(-1, tokens[part, None])[:, 0]
        entropy[part] = torch.special.entr(log_p.exp_()).sum(-1)
    return TokenStatistics(log_prob, entropy)


@torch.no_grad()
def exact_kl(
    p_logits: torch.Tensor, q_logits: torch.Tensor, temperature: float = 1.0, *, chunk_elements: int = CHUNK_ELEMENTS
) -> torch.Tensor:
    """Return KL(p || q) of each position, float64 [n], over the whole vocabulary of two tensors of logits [n, V].

    Differences of nearly equal log-probabilities are taken in float64: at 1e-6 nats float32 would be noise.
    ValueError where the shapes differ.
    """
    if p_logits.shape != q_logits.shape or p_logits.dim() != 2:
        raise ValueError(
            f"logits of two policies must be [n, V] alike, not {tuple(p_logits.shape)} and {tuple(q_logits.shape)}"
        )
    rows = max(chunk_elements // 2 // max(p_logits.shape[1], 1), 1)
    result = torch.empty(len(p_logits), dtype=torch.float64, device=p_logits.device)
    for begin in range(0, len(p_logits), rows):
        part = slice(begin, begin + rows)
        log_p = torch.log_softmax(p_logits[part].double() / temperature, -1)
        log_q = torch.log_softmax(q_logits[part].double() / temperature, -1)
        # 0 log 0 = 0: a masked-out token has no part in p
        terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
        result[part] = terms.sum(-1)
    return result
