"""Attention's own two products, each with quantized operands in forward and backward.

    S = Q(q) Q(k)^T      dq = Q(dS) Q(k)      dk = Q(dS)^T Q(q)        each along its own contraction axis,
    O = Q(p) Q(v)        dp = Q(dO) Q(v)^T    dv = Q(p)^T Q(dO)        per batch and head

A product is that of a Linear, A B^T with A in the part of X and B in that of W: q and p take x_fwd and x_wgrad, k and
v^T take w_fwd and w_dgrad, dS and dO take g_dgrad and g_wgrad. Softmax, mask, scale and dropout are exact.
Shapes: A [..., T, K], B [..., S, K], A B^T [..., T, S].
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mxprobe.emulation.linear import Plan, emulated_linear

_QK, _PV = 0, 8
"""Offsets in a module's salt, which has room for sixteen operands."""


def emulated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    plan: Plan,
    salt: int = 0,
) -> torch.Tensor:
    """Compute F.scaled_dot_product_attention (same arguments and result) written out, with emulated products.

    Softmax is computed in float32 or better and rounded to the operands' dtype; a row that is masked throughout is 0.
    """
    if enable_gqa:
        n_shared = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(n_shared, dim=-3) for t in (key, value))
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (t.expand(*leading, *t.shape[-2:]) for t in (query, key, value))
    scores = emulated_linear(query, key, None, plan, salt + _QK) * (
        1 / math.sqrt(query.shape[-1]) if scale is None else scale
    )
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~lower, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    wide = scores if scores.dtype is torch.float64 else scores.float()
    empty = (wide == -math.inf).all(-1, keepdim=True)
    probabilities = torch.softmax(wide.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    probabilities = F.dropout(probabilities.to(query.dtype), dropout_p)
    return emulated_linear(probabilities, value.transpose(-2, -1), None, plan, salt + _PV)


class InterceptAttention(TorchFunctionMode):
    """Emulates scaled_dot_product_attention, and products of two tensors of three or more axes, called inside."""

    def __init__(self, plan: Plan, salt: int, on_product: Callable[[], None]) -> None:
        super().__init__()
        self._plan = plan
        self._salt = salt
        self._on_product = on_product
        self._offset = _QK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._on_product()
            return emulated_attention(*args, **kwargs, plan=self._plan, salt=self._salt)
        if func in _PRODUCTS and not kwargs and _is_batched(*args):
            self._on_product()
            offset, self._offset = self._offset, _PV  # the first is q k^T
            return emulated_linear(args[0], args[1].transpose(-2, -1), None, self._plan, self._salt + offset)
        return func(*args, **kwargs)


def _is_batched(a: torch.Tensor, b: torch.Tensor) -> bool:
    return min(a.dim(), b.dim()) >= 3 and a.shape[:-2] == b.shape[:-2]


_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)
