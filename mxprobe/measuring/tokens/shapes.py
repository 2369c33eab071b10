"""How many tokens a forward is given, read off its arguments.

B = sequences, T = tokens of each, C = features. Tokens are integers [B, T] or rows of floating point [B, T, C].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_NAMED = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
_NOT_TOKENS = ("mask", "position", "label", "type", "cache", "past")


def find_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the argument of a forward that holds its tokens; None where none looks like it."""
    return next((each for each in _candidates(args, kwargs) if token_shape(each) is not None), None)


def token_shape(x: Any) -> tuple[int, int] | None:
    """Return (B, T) of tokens [B, T] or of rows [B, ..., T, C]; None where there is no axis of tokens."""
    if not isinstance(x, torch.Tensor) or x.dtype is torch.bool or x.is_complex() or not x.numel():
        return None
    if x.is_floating_point():
        return (x.shape[0], x.shape[-2]) if x.dim() >= 3 else None
    return (x.shape[0], x.shape[1]) if x.dim() == 2 else None


def _candidates(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """In the order of their likelihood; a mapping stands for what it holds."""
    yield from (kwargs.get(name) for name in _NAMED)
    for each in args:
        if isinstance(each, Mapping):
            yield from _candidates((), each)
        else:
            yield each
    for name, each in kwargs.items():
        if not any(part in str(name) for part in _NOT_TOKENS):
            yield each
