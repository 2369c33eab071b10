"""At which temperature the rollout samples, taken from what both sides say of the same tokens: table `rollouts`.

    u = log p_rollout(token) + H_rollout        d = log p_rollout - log p_train
    T = 1 - sum u d / sum u^2                   p_rollout is nearest to p_train^(1/T), normalised

Derivation. If p_rollout ~ p_train^(1/T), then log p_train = T log p_rollout + c with a c that depends on the context
alone, so d = (1 - T) u + c'. Of a plain draw from the rollout, u has mean 0 whatever the context: <u, c'> vanishes and
the slope of d on u is 1 - T. In general T is the least-squares fit of that form over the tokens. 1: neither sharper
nor flatter; above 1: the rollout is flatter than the trainer's policy. Relative: where both are taken at a sampling
temperature, it multiplies that.

Uncertainty: the t interval over steps of a ratio of sums. What a noisy mismatch (d independent of u) does to T is in
it. Withheld where the batch holds no entropies of the rollout, and where the mean of u is off 0 by more than
`MAX_OFF` standard errors: then tokens were not drawn from the softmax that their log-probabilities are of (top-k,
top-p, penalties, greedy decoding), and the slope is biased.
"""

import math
from dataclasses import dataclass

import pandas as pd

from .replay_effects import ratio_of
from .token_mismatch import all_tokens

MAX_OFF = 4.0
_SUMS = ["n_tokens", "sum_u", "sum_u2", "sum_u_d"]
NO_ENTROPIES = "the batch holds no entropies of the rollout"
NO_DRAWS = (
    "the tokens are no plain draws from the rollout's softmax (top-k, top-p, penalties or greedy decoding): their mean "
    "log-probability is off the negative entropy"
)
NO_SPREAD = "the rollout's policy is certain of every token"
NO_TOKENS = "no token was seen on both sides"


@dataclass(frozen=True)
class EffectiveTemperature:
    """T with its 95 % interval; NaN where it is withheld, the interval infinite with fewer than two steps."""

    value: float
    low: float
    high: float
    n_steps: int
    n_tokens: int
    withheld: str = ""
    """Why there is no value; "" where there is one."""


def effective_temperature(rollouts: pd.DataFrame) -> EffectiveTemperature:
    """Return it for all tokens of a `rollouts` frame, stratum `all`, of one source."""
    rows = all_tokens(rollouts)
    steps = rows.groupby("step")[_SUMS].sum(min_count=1)
    steps = steps[steps["n_tokens"] > 0]
    n_tokens = int(steps["n_tokens"].sum())
    known = steps.dropna()
    why = _withheld(n_tokens, *(float(known[name].sum()) for name in _SUMS[1:]), n_known=len(known))
    if why:
        return EffectiveTemperature(math.nan, math.nan, math.nan, len(known), n_tokens, why)
    slope = ratio_of(known["sum_u_d"].to_numpy(dtype=float), known["sum_u2"].to_numpy(dtype=float))
    n_known = int(known["n_tokens"].sum())
    return EffectiveTemperature(1.0 - slope.value, 1.0 - slope.high, 1.0 - slope.low, slope.n, n_known)


def _withheld(n_tokens: float, u: float, u2: float, u_d: float, *, n_known: int) -> str:
    if not n_tokens > 0:
        return NO_TOKENS
    if not n_known or not math.isfinite(u_d):
        return NO_ENTROPIES
    if not u2 > 0:
        return NO_SPREAD
    return NO_DRAWS if abs(u) > MAX_OFF * math.sqrt(u2) else ""
