"""Fingerprints by which sequences are told to begin alike, without keeping their tokens.

    f(b, n) = sum over t < n of w_t id_bt   (mod 2^64)        w_t pseudo-random

Two rows that begin with the same n tokens have the same f(., n), and others but by chance 2^-63. On the CPU only: on
another device a comparison would have to wait for it.
"""

from __future__ import annotations

import torch

from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed

_MAX_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Prefixes:
    """Fingerprints of every prefix of B sequences of length T."""

    def __init__(self, ids: torch.Tensor, *, of_ids: bool = True) -> None:
        """ids int64 [B, T]."""
        self.of_ids = of_ids
        """Else of rows: those of the same tokens have other fingerprints."""
        self._sums = (ids * _weights(ids.shape[1])).cumsum(1)

    @classmethod
    def of(cls, x: torch.Tensor) -> Prefixes | None:
        """Return those of tokens [B, T], or of rows [B, T, C] by their bits; None where x cannot be read for free."""
        if (
            not is_plain(x)
            or x.dim() > 3
            or x.device.type != "cpu"
            or not 0 < x.numel() <= _MAX_ELEMENTS
            or is_off_limits(x)
        ):
            return None
        with undisturbed("cpu"):
            x = x.detach()
            if x.is_floating_point():
                x = x.contiguous().view(_INTEGERS[x.element_size()])
            x = x.to(torch.int64)
            return cls(x) if x.dim() == 2 else cls((x * _weights(x.shape[-1])).sum(-1), of_ids=False)

    @property
    def size(self) -> int:
        return self._sums.numel()

    def begins_like(self, other: Prefixes) -> bool:
        """Whether each row begins with the other's row of the same number, which is no longer."""
        n, theirs = other._sums.shape[1], other._sums[:, -1]
        return len(theirs) == len(self._sums) and torch.equal(self._sums[:, n - 1], theirs)

    def rows(self, n: int) -> frozenset[int]:
        """Return the fingerprints of the rows' first n tokens."""
        return frozenset(self._sums[:, n - 1].tolist())


def _weights(n: int) -> torch.Tensor:
    """int64 [n], odd: the finalizer of splitmix64; the first are the same for every n."""
    w = torch.arange(1, n + 1).mul_(_signed(0x9E3779B97F4A7C15))
    w = w.bitwise_xor_(w >> 30).mul_(_signed(0xBF58476D1CE4E5B9))
    return w.bitwise_xor_(w >> 27).bitwise_or_(1)


def _signed(value: int) -> int:
    """Return the int64 of these 64 bits."""
    return value - (1 << 64) if value >> 63 else value
