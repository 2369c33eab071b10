"""Log-probabilities of sampled tokens by rollout and trainer: the mismatch itself, over steps and by stratum."""

import numpy as np
import pandas as pd

from mxprobe.attribution.token_mismatch import of_one_source

from .markup import Html, basis, card, number, percent, scope, table, tag

ALL = "all"
_SUMS = ["n_tokens", "sum_d", "sum_abs_d", "sum_k3", "sum_abs_dp", "sum_w", "sum_w2", "n_outside_clip", "n_false_clip"]


def mismatch_by_step(rollouts: pd.DataFrame) -> pd.Series:
    """Step -> mean |log p rollout - log p trainer| over the tokens of all ranks, nats; empty where not measured."""
    rows = of_one_source(rollouts[(rollouts["stratum"].astype(str) == ALL).to_numpy()])
    sums = rows.groupby("step")[["sum_abs_d", "n_tokens"]].sum()
    sums = sums[sums["n_tokens"] > 0]
    return (sums["sum_abs_d"] / sums["n_tokens"]).astype(float)


def section(rollouts: pd.DataFrame) -> Html:
    """Nothing where no log-probability was measured: the verdict's caveats say so."""
    rows = of_one_source(rollouts.assign(stratum=rollouts["stratum"].astype(str)))
    sums = rows.groupby("stratum", sort=False)[_SUMS].sum(min_count=1)  # a column not known stays unknown
    sums = sums[sums["n_tokens"] > 0]
    if sums.empty:
        return Html("")
    head = ["tokens", "counted", "mean |d|, nats", "KL k1, nats", "KL k3, nats", "mean |Δp|"]
    head += ["effective sample", "outside clip", "false clip"]
    body = [_row(str(stratum), each) for stratum, each in sums.iterrows()]
    found, missed = (int(rows.loc[rows["stratum"] == ALL, name].sum()) for name in ("n_sequences", "n_unmatched"))
    note = (
        "d = log p rollout − log p trainer of the sampled tokens, w = exp(−d), Δp the difference of the probabilities; "
        "effective sample (Σw)² / n Σw²; outside clip: |w − 1| > 0.2; false clip: those of them whose gradient PPO "
        f"takes away, for the mismatch alone. {found} sequences were found in a training batch, {missed} looked for in "
        "vain. Rows: all tokens, then parts of them: quarters by the rollout's entropy (q1 the lowest), sign of the "
        "advantage, position, response length, lag of the policy's version."
    )
    return card(
        "Log-probabilities of rollout and trainer",
        table(head, body, numeric=range(1, len(head)), class_="compact"),
        tag("p", note, class_="note"),
        id="rollouts",
        kind=tag("span", scope("steps", "rank"), basis("measured")),
    )


def _row(stratum: str, sums: pd.Series) -> list[object]:
    n = float(sums["n_tokens"])
    sample = float(sums["sum_w"]) ** 2 / (n * float(sums["sum_w2"])) if sums["sum_w2"] > 0 else np.nan
    means = [number(float(sums[name]) / n) for name in ("sum_abs_d", "sum_d", "sum_k3", "sum_abs_dp")]
    clipped = [percent(float(sums[name]) / n) for name in ("n_outside_clip", "n_false_clip")]
    return [stratum.replace("_", " "), f"{n:.0f}", *means, percent(sample), *clipped]
