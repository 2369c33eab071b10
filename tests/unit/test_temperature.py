"""The effective temperature against policies whose temperature is known, and what withholds it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from mxprobe.attribution.temperature import (
    NO_DRAWS,
    NO_ENTROPIES,
    NO_SPREAD,
    NO_TOKENS,
    effective_temperature,
)
from mxprobe.measuring.tokens.mismatch import Pairs, rollout_rows

VOCABULARY, N = 50, 4000


def policies(temperature: float, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of trainer and rollout, float64 [N, V]."""
    generator = torch.Generator().manual_seed(seed)
    trainer = 2.0 * torch.randn(N, VOCABULARY, generator=generator, dtype=torch.float64)
    other = torch.randn(N, VOCABULARY, generator=generator, dtype=torch.float64)
    return trainer, trainer / temperature + noise * other


def step_of(
    seed: int, *, temperature: float = 1.0, noise: float = 0.0, top_p: float = 1.0, source: str = "generation"
) -> list[dict[str, object]]:
    trainer, rollout = (logits.log_softmax(-1) for logits in policies(temperature, noise, seed))
    drawn = rollout.exp()
    if top_p < 1.0:
        order = drawn.sort(-1, descending=True)
        left = order.values.cumsum(-1) - order.values < top_p
        drawn = torch.zeros_like(drawn).scatter(-1, order.indices, order.values * left)
    tokens = torch.multinomial(drawn, 1, generator=torch.Generator().manual_seed(seed + 1))
    entropy = -(rollout.exp() * rollout).sum(-1)
    pairs = Pairs(rollout.gather(-1, tokens)[:, 0], trainer.gather(-1, tokens)[:, 0], 4, entropy_rollout=entropy)
    return [{"step": seed, "source": source, **row} for row in rollout_rows(pairs)]


def frame(**how: float) -> pd.DataFrame:
    return pd.DataFrame([row for seed in range(8) for row in step_of(10 * seed, **how)])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.3])
def test_a_known_temperature_is_found(temperature: float):
    found = effective_temperature(frame(temperature=temperature))
    assert found.value == pytest.approx(temperature, abs=0.01)
    assert found.low <= found.value <= found.high
    assert (found.withheld, found.n_steps, found.n_tokens) == ("", 8, 8 * N)


def test_noise_on_the_logits_widens_the_interval_and_reads_as_a_sharper_rollout():
    """Noise spreads the logits. The reference: <u, log p_train> / <u, u> over the whole vocabulary, no draws."""
    found = effective_temperature(frame(noise=0.5))
    assert found.high < 1.0
    expected = []
    for seed in range(8):
        trainer, rollout = (logits.log_softmax(-1) for logits in policies(1.0, 0.5, 10 * seed))
        p = rollout.exp()
        u = rollout - (p * rollout).sum(-1, keepdim=True)
        expected.append([float((p * u * trainer).sum()), float((p * u * u).sum())])
    above, below = np.array(expected).sum(0)
    assert found.low < above / below < found.high


def test_sums_against_their_definition():
    log_p, log_q, entropy = (torch.tensor(x, dtype=torch.float64) for x in ([-1.0, -2.0], [-1.5, -1.0], [1.2, 1.4]))
    (row,) = rollout_rows(Pairs(log_p, log_q, 1, entropy_rollout=entropy))
    u, d = np.array([0.2, -0.6]), np.array([0.5, -1.0])
    assert row["sum_u"] == pytest.approx(u.sum())
    assert row["sum_u2"] == pytest.approx(u @ u)
    assert row["sum_u_d"] == pytest.approx(u @ d)
    one = effective_temperature(pd.DataFrame([{"step": 1, "source": "generation", **row}]))
    assert one.value == pytest.approx(1.0 - (u @ d) / (u @ u))
    assert (one.low, one.high) == (-math.inf, math.inf)  # one step has no interval


def test_what_withholds_it():
    cut = effective_temperature(frame(top_p=0.8))
    assert cut.withheld == NO_DRAWS
    assert math.isnan(cut.value)
    rows = frame()
    assert effective_temperature(rows.assign(sum_u=None, sum_u2=None, sum_u_d=None)).withheld == NO_ENTROPIES
    assert effective_temperature(rows.assign(sum_u=0.0, sum_u2=0.0, sum_u_d=0.0)).withheld == NO_SPREAD
    assert effective_temperature(rows.iloc[:0]).withheld == NO_TOKENS
