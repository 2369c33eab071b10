"""Finds jumps of the mismatch between rollout and trainer, in the metrics that a run logs."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

JUMP_FACTOR = 5.0
MIN_PAST = 8
PAST = 64
MIN_VALUE = 1e-4
"""Nats; below it a mismatch is no finding, whatever it was before."""
WATCHED = frozenset({"mismatch_kl", "mismatch_kl_reverse", "mismatch_logp_abs_mean"})


class MismatchWatch:
    """A value over JUMP_FACTOR times the median of the same source's last values is a jump."""

    def __init__(self) -> None:
        self._past: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=PAST))

    def see(self, columns: Mapping[str, Sequence[Any]]) -> str:
        """Return what jumped in rows of table `signals` with canonical names, in words; empty if nothing did."""
        found = ""
        names = ("source", "raw_key", "metric", "value", "step")
        for source, key, metric, value, step in zip(*(columns[name] for name in names), strict=True):
            if metric not in WATCHED or value is None or value != value:
                continue
            past = self._past[(source, key)]
            usual = median(past) if len(past) >= MIN_PAST else None
            if usual is not None and abs(value) > max(JUMP_FACTOR * abs(usual), MIN_VALUE):
                found = found or f"mismatch jump: {key} {value:.4g} at step {step}, its median {usual:.4g}"
            past.append(value)
        return found
