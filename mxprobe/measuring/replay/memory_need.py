"""Memory that a replay will hold, known before it runs: upper bounds from the shapes of what it runs.

R rows replayed, V width of the logits (1 where there are none), over the Linears: K in features, O out features.

    sensitivity  = R (ACTIVATION sum(K + O) b + 36 max(K + O) + LOGIT V) + 4 max(K O) + CHUNK
    arms         = R (ACTIVATION sum(K + O) b + 160 max(K + O) + LOGIT V) + 4 sum(K O) + 2 dW + 120 max(K O)
    directions   = R (40 sum(K + O)) + 40 sum(K O), added to the arms'

b: bytes of an element. What attention keeps of a row does not show in the Linears' shapes; the factor has room for
fused kernels, not for scores of long sequences. `tests/unit/test_replay_need.py` holds the bounds against what lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mxprobe.measuring.replay.backward import MAX_GRADIENT_ELEMENTS
from mxprobe.measuring.replay.gradient_probes import MAX_ELEMENTS
from mxprobe.measuring.replay.sensitivity import CHUNK_ELEMENTS

ACTIVATION = 3.0
LOGIT_BYTES = 80
CHUNK_BYTES = 100
PASSING_BYTES = 120
DIRECTION_BYTES = 20


@dataclass(frozen=True)
class Shapes:
    """Shapes of a captured call and of the Linears it runs through."""

    n_samples: int
    rows_per_sample: int
    width: int
    """V."""
    element_bytes: int
    features: tuple[tuple[int, int], ...]
    """(O, K) of each Linear."""
    kept_bytes: int = 0
    """Held from the capture on: arguments, gathered parameters, the gradient at the policy."""

    @classmethod
    def of(
        cls,
        modules: Mapping[str, nn.Linear],
        policy: tuple[int, ...],
        element_bytes: int,
        kept_bytes: int = 0,
    ) -> Shapes:
        """Describe a call whose policy has the shape [B, T, V] or [B, T]."""
        n_samples, rows, *width = policy
        features = tuple((each.out_features, each.in_features) for each in modules.values())
        return cls(n_samples, rows, width[0] if width else 1, element_bytes, features, kept_bytes)

    @property
    def _per_row(self) -> float:
        return ACTIVATION * self.element_bytes * sum(o + k for o, k in self.features) + LOGIT_BYTES * self.width

    @property
    def _weights(self) -> int:
        return sum(o * k for o, k in self.features)

    @property
    def _largest(self) -> int:
        return max((o * k for o, k in self.features), default=0)

    @property
    def _widest(self) -> int:
        return max((o + k for o, k in self.features), default=0)

    def of_sensitivity(self, n_samples: int) -> int:
        """Return the bytes that a replay of so many samples holds at most."""
        rows = n_samples * self.rows_per_sample
        fixed = 4 * self._largest + CHUNK_BYTES * min(CHUNK_ELEMENTS, max(self._largest, rows * self._widest))
        return self.kept_bytes + fixed + int(rows * (self._per_row + 36 * self._widest))

    def of_arms(self, n_directions: int) -> int:
        """Return the bytes that a replay of the whole call under other roundings holds at most."""
        rows = self.n_samples * self.rows_per_sample
        gradients = 2 * 4 * min(self._weights, MAX_GRADIENT_ELEMENTS)
        fixed = 4 * self._weights + gradients + PASSING_BYTES * max(self._largest, rows * self._widest)
        directions = 0
        operands = 2 * (rows * sum(o + k for o, k in self.features) + self._weights)
        if n_directions and operands <= MAX_ELEMENTS:
            directions = DIRECTION_BYTES * operands
        return self.kept_bytes + fixed + int(rows * self._per_row) + directions

    def samples_that_fit(self, n_bytes: float, max_rows: int) -> int:
        """Return as many samples as have `max_rows` rows, one at least, or fewer; 0 where none fits."""
        n = min(max(max_rows // max(self.rows_per_sample, 1), 1), self.n_samples)
        while n and self.of_sensitivity(n) > n_bytes:
            n //= 2
        return n
