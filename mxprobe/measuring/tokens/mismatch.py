"""How rollout and trainer differ on the same tokens, as sums over strata: rows of table `rollouts`.

    d = log p_rollout(token) - log p_train(token)        w = exp(-d)        dp = p_rollout - p_train

    k1 = mean d    k2 = mean d^2 / 2    k3 = mean (w - 1 + d)    |d|    |dp|    ESS = (sum w)^2 / (n sum w^2)

u = log p_rollout(token) + H_rollout is 0 on average where the token is a plain draw; the rollout's temperature
relative to the trainer's is 1 - sum u d / sum u^2: `mxprobe.attribution.temperature`.

False clipping: PPO takes the gradient of a token away where w > 1 + eps at an advantage > 0, or w < 1 - eps at one
< 0. Where w is taken between rollout and trainer, before any update, that is the mismatch's doing alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from mxprobe.schema import Row

CLIP_EPSILON = 0.2
"""A token counts as outside the clip range where p_train / p_rollout is not within 1 -+ this."""
MIN_TOKENS = 4
"""Tokens that each quarter by entropy must have."""
ALL = "all"
QUARTERS = ("entropy_q1", "entropy_q2", "entropy_q3", "entropy_q4")
OCTAVES = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position (or length) of each bin."""
MAX_LAG = 4
UNKNOWN = -1


def coarsest(dtypes: Iterable[torch.dtype | None]) -> str:
    """Name the coarsest of the dtypes that are known: `bfloat16`, `float32`, ..."""
    known = [dtype for dtype in dtypes if dtype is not None]
    return str(max(known, key=lambda dtype: torch.finfo(dtype).eps)).replace("torch.", "")


class Pairs(NamedTuple):
    """Tokens seen on both sides, on the CPU, [n] each. What is not known is None, of single tokens NaN or -1."""

    log_prob_rollout: torch.Tensor
    """float64"""
    log_prob_train: torch.Tensor
    n_sequences: int
    n_unmatched: int = 0
    """Sequences looked for and not found in a training batch of the step."""
    entropy_rollout: torch.Tensor | None = None
    """float64, nats"""
    entropy_train: torch.Tensor | None = None
    advantage: torch.Tensor | None = None
    """float64, NaN where not known"""
    position: torch.Tensor | None = None
    """int64: 0 for the first token of a response"""
    length: torch.Tensor | None = None
    """int64: tokens of the response that this one belongs to"""
    lag: torch.Tensor | None = None
    """int64: updates between the policy that drew the token and the trainer's; -1 where not known"""
    flipped: torch.Tensor | None = None
    """bool: a router sent the position that predicts the token to other experts in training than in generation"""

    def take(self, index: torch.Tensor) -> Pairs:
        """Return the tokens of an index or mask."""
        return self._replace(
            **{name: value[index] for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
        )


def rollout_rows(pairs: Pairs) -> Iterator[Row]:
    """Yield rows of table `rollouts` without when, source, temperature and dtype: all tokens, then the strata."""
    finite = (pairs.log_prob_rollout - pairs.log_prob_train).isfinite()
    n_nonfinite = int((~finite).sum())
    if n_nonfinite:
        pairs = pairs.take(finite)
    for stratum, index in _strata(pairs):
        part = pairs if index is None else pairs.take(index)
        yield {
            "stratum": stratum,
            "n_sequences": pairs.n_sequences,
            "n_unmatched": pairs.n_unmatched,
            "n_nonfinite": n_nonfinite if index is None else 0,
            **_sums(part),
        }


def _strata(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield ALL, None
    n = len(pairs.log_prob_rollout)
    if pairs.entropy_rollout is not None and n >= MIN_TOKENS * len(QUARTERS):
        yield from zip(QUARTERS, torch.tensor_split(pairs.entropy_rollout.argsort(stable=True), len(QUARTERS)))
    masks: list[tuple[str, torch.Tensor]] = []
    if pairs.advantage is not None:
        signs = (("positive", pairs.advantage > 0), ("negative", pairs.advantage < 0), ("zero", pairs.advantage == 0))
        masks += [(f"advantage_{name}", mask) for name, mask in signs]
    for name, values in (("position", pairs.position), ("length", pairs.length)):
        if values is not None:
            ends = (*OCTAVES[1:], 1 << 62)
            masks += [(f"{name}_{begin}", (values >= begin) & (values < end)) for begin, end in zip(OCTAVES, ends)]
    if pairs.lag is not None:
        masks += [(f"lag_{k}", pairs.lag == k) for k in range(MAX_LAG)] + [(f"lag_{MAX_LAG}", pairs.lag >= MAX_LAG)]
    if pairs.flipped is not None:
        masks += [("routing_same", ~pairs.flipped), ("routing_flipped", pairs.flipped)]
    yield from ((name, mask) for name, mask in masks if bool(mask.any()))


def _sums(pairs: Pairs) -> Row:
    d = pairs.log_prob_rollout - pairs.log_prob_train
    w = (-d).exp()
    dp = pairs.log_prob_rollout.exp() - pairs.log_prob_train.exp()
    above, below = w > 1.0 + CLIP_EPSILON, w < 1.0 - CLIP_EPSILON
    false_clip: int | None = None
    if pairs.advantage is not None and bool(pairs.advantage.isfinite().all()):
        false_clip = int(((above & (pairs.advantage > 0)) | (below & (pairs.advantage < 0))).sum())
    u = None if pairs.entropy_rollout is None else pairs.log_prob_rollout + pairs.entropy_rollout
    return {
        "n_tokens": len(d),
        "sum_d": float(d.sum()),
        "sum_abs_d": float(d.abs().sum()),
        "sum_d2": float(d.square().sum()),
        "max_abs_d": float(d.abs().max()) if len(d) else 0.0,
        "sum_k3": float((w - 1.0 + d).sum()),
        "sum_w": float(w.sum()),
        "sum_w2": float(w.square().sum()),
        "sum_dp": float(dp.sum()),
        "sum_abs_dp": float(dp.abs().sum()),
        "n_outside_clip": int((above | below).sum()),
        "n_false_clip": false_clip,
        "sum_entropy_rollout": None if pairs.entropy_rollout is None else float(pairs.entropy_rollout.sum()),
        "sum_entropy_train": None if pairs.entropy_train is None else float(pairs.entropy_train.sum()),
        "sum_u": None if u is None else float(u.sum()),
        "sum_u2": None if u is None else float(u.square().sum()),
        "sum_u_d": None if u is None else float((u * d).sum()),
    }


def signal_values(row: Row) -> list[tuple[str, str, str, float]]:
    """Return (key, canonical metric, estimator, value) of the row of all tokens, for table `signals`."""
    n = row["n_tokens"]
    if not n:
        return []
    values = [
        ("mxprobe/mismatch_k1", "mismatch_kl", "k1", row["sum_d"] / n),
        ("mxprobe/mismatch_k2", "mismatch_kl", "k2", row["sum_d2"] / (2 * n)),
        ("mxprobe/mismatch_k3", "mismatch_kl", "k3", row["sum_k3"] / n),
        ("mxprobe/mismatch_abs_dlogp", "mismatch_logp_abs_mean", "abs_dlogp", row["sum_abs_d"] / n),
        ("mxprobe/mismatch_abs_dp", "mismatch_prob_diff_mean", "prob_diff", row["sum_abs_dp"] / n),
        ("mxprobe/mismatch_ess", "mismatch_ess", "", row["sum_w"] ** 2 / (n * row["sum_w2"])),
    ]
    if row["n_false_clip"] is not None:
        values.append(("mxprobe/false_clip", "mismatch_false_clip", "", row["n_false_clip"] / n))
    if row["sum_entropy_train"] is not None:
        values.append(("mxprobe/entropy", "entropy", "", row["sum_entropy_train"] / n))
    return values


def table_rows(
    pairs: Pairs, when: Row, source: str, *, signal_source: str, temperature: float, dtype: str
) -> Iterator[tuple[str, Row]]:
    """Yield (table, row) of `rollouts`, and of `signals` for all tokens together.

    `when`: the columns step and time_ns. `signal_source`: the source that the signals are filed under.
    """
    for row in rollout_rows(pairs):
        yield "rollouts", {**when, "source": source, "temperature": temperature, "dtype": dtype, **row}
        if row["stratum"] == ALL:
            for key, metric, estimator, value in signal_values(row):
                named = {"raw_key": key, "metric": metric, "estimator": estimator, "value": value}
                yield "signals", {**when, "source": signal_source, "framework": "mxprobe", **named}
