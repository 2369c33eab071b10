"""Log-probabilities of sampled tokens by rollout and trainer: the mismatch itself, over steps and by stratum."""

import numpy as np
import pandas as pd
from markupsafe import Markup

from mxprobe.attribution.token_mismatch import of_one_source
from mxprobe.numbers import number, percent

from .rendering import render

ALL = "all"
_SUMS = ["n_tokens", "sum_d", "sum_abs_d", "sum_k3", "sum_abs_dp", "sum_w", "sum_w2", "n_outside_clip", "n_false_clip"]


def mismatch_by_step(rollouts: pd.DataFrame) -> pd.Series:
    """Return step -> mean |log p rollout - log p trainer| over the tokens of all ranks, in nats; may be empty."""
    rows = of_one_source(rollouts[(rollouts["stratum"].astype(str) == ALL).to_numpy()])
    sums = rows.groupby("step")[["sum_abs_d", "n_tokens"]].sum()
    sums = sums[sums["n_tokens"] > 0]
    return (sums["sum_abs_d"] / sums["n_tokens"]).astype(float)


def section(rollouts: pd.DataFrame) -> Markup:
    """Return nothing where no log-probability was measured: the verdict's caveats say so."""
    rows = of_one_source(rollouts.assign(stratum=rollouts["stratum"].astype(str)))
    sums = rows.groupby("stratum", sort=False)[_SUMS].sum(min_count=1)  # a column not known stays unknown
    sums = sums[sums["n_tokens"] > 0]
    if sums.empty:
        return Markup()
    found, missed = (int(rows.loc[rows["stratum"] == ALL, name].sum()) for name in ("n_sequences", "n_unmatched"))
    body = [_row(str(stratum), each) for stratum, each in sums.iterrows()]
    return render("logprobs.html", rows=body, n_found=found, n_missed=missed)


def _row(stratum: str, sums: pd.Series) -> list[object]:
    n = float(sums["n_tokens"])
    sample = float(sums["sum_w"]) ** 2 / (n * float(sums["sum_w2"])) if sums["sum_w2"] > 0 else np.nan
    means = [number(float(sums[name]) / n) for name in ("sum_abs_d", "sum_d", "sum_k3", "sum_abs_dp")]
    clipped = [percent(float(sums[name]) / n) for name in ("n_outside_clip", "n_false_clip")]
    return [stratum.replace("_", " "), f"{n:.0f}", *means, percent(sample), *clipped]
