"""What neighbouring papers measure of the same rounding error, from a trace's sums; definitions and sources.

    bucket_ratio   H(code histogram) / log2 15, in bits, +0 and -0 together: 1 where all 15 E2M1 values are used alike
    alignment      ||E_W X^T||^2 d_in / (||E_W||^2 ||X||^2) of weights, likewise of inputs: more than 1 where the error
                   and what it meets align
    coverage_K     part of ||e||^2 in the K % of channels with most of it; sparse_K: of each row's elements
    transposition  ||Q_row(W) - Q_col(W)|| / ||W||, on the elements measured along both axes; .04 to .075 on Gaussians
    snr_db         10 log10 ||y||^2 / ||error||^2 of a Linear's output when all Linears round; `injected`, `propagated`:
                   parts of ||y||^2 that its own rounding and the layers before it add, which overlap
    basin_cosine   cos(gradient at w = Q(w), w - Q(w)): below 0 a descent step from Q(w) leads back towards w
    relative_drift Y / X, both mean |p_rollout - p_train|, in the last and in the first quarter of the measured steps

All definitions, units and papers: `paper_columns.toml`.

Oscillation (TetraJet) is in `updates`, gradient and KL effects in `replays`. Sums are added first, divided last; the
channels of `coverage` are ranked anew in each probed step.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.schema import CODE_BINS, Role

from .token_mismatch import all_tokens

N_VALUES = 15
MIN_DRIFT_STEPS = 8
_KEYS = ("module", "role", "phase")
Array = npt.NDArray[np.float64]


def bucket_ratio(code_hist: Array) -> float:
    """Return it for a histogram [16] by sign * 8 + code; NaN without elements."""
    counts = np.asarray(code_hist, dtype=float).reshape(CODE_BINS)
    half = CODE_BINS // 2
    merged = np.concatenate(([counts[0] + counts[half]], counts[1:half], counts[half + 1 :]))
    total = merged.sum()
    if total <= 0:
        return float("nan")
    p = merged[merged > 0] / total
    return float(-(p * np.log2(p)).sum() / np.log2(N_VALUES))


def bucket_ratios(tensors: pd.DataFrame, by: Sequence[str] = _KEYS) -> pd.DataFrame:
    """Return the column `bucket_ratio` per group of a `tensors` frame; rows without a histogram are left out."""
    rows = tensors[tensors["code_hist"].notna()]
    grouped = rows.groupby(list(by), observed=True, sort=True)["code_hist"]
    return grouped.agg(lambda hists: bucket_ratio(np.stack(hists.tolist()).sum(0))).reset_index(name="bucket_ratio")


def alignments(tensors: pd.DataFrame, modules: pd.DataFrame) -> pd.DataFrame:
    """Return `module`, `phase`, `role` (x_fwd, w_fwd), `alignment`, from steps that measured both X and W.

    d_in is the second dimension of a module's shape. Both tensors are the sampled ones, whose product was taken.
    """
    keys = ["step", "module", "phase"] + (["rank"] if "rank" in tensors else [])
    columns = ["sum_x2", "sum_e2", "out_e2"]
    x, w = (
        tensors[tensors["role"].astype(str) == role.value].groupby(keys, observed=True)[columns].sum()
        for role in (Role.X_FWD, Role.W_FWD)
    )
    both = x.add_suffix("_x").join(w.add_suffix("_w"), how="inner").reset_index()
    named = zip(modules["module"].astype(str), modules["shape"], strict=True)
    shapes = {name: shape[1] for name, shape in named if _is_matrix(shape)}
    both["d_in"] = both["module"].astype(str).map(shapes).astype(float)
    found: list[pd.DataFrame] = []
    for role, own, met in ((Role.X_FWD, "x", "w"), (Role.W_FWD, "w", "x")):
        below = both[f"sum_e2_{own}"] * both[f"sum_x2_{met}"] / both["d_in"]
        parts = both.assign(above=both[f"out_e2_{own}"], below=below)
        sums = parts.groupby(["module", "phase"], observed=True)[["above", "below"]].sum().reset_index()
        ratio = sums["above"] / sums["below"].where(sums["below"] > 0)
        found.append(sums[["module", "phase"]].assign(role=role.value, alignment=ratio))
    return pd.concat(found, ignore_index=True)


def _is_matrix(shape: object) -> bool:
    return isinstance(shape, (list, tuple, np.ndarray)) and len(shape) == 2


def block_ratios(blocks: pd.DataFrame, by: Sequence[str] = _KEYS) -> pd.DataFrame:
    """Return the ratios of `paper_columns.toml` that table `blocks` gives, per group of it.

    NaN where a trace of an older version does not tell, and `transposition` for all operands but w_dgrad.
    """
    names = [name for name in blocks.columns if name.startswith(("sum_", "n_"))]
    s = blocks.groupby(list(by), observed=True, sort=True)[names].sum(min_count=1).astype(float)
    n = s["n_blocks"].where(s["n_blocks"] > 0)
    crest, underflow = s["sum_crest"] / n, s["sum_underflow"] / n
    covariance = s["sum_crest_underflow"] / n - crest * underflow
    spread = (s["sum_crest2"] / n - crest**2) * (s["sum_underflow2"] / n - underflow**2)
    e2 = s["sum_e2"].where(s["sum_e2"] > 0)
    return pd.DataFrame(
        {
            "crest": crest,
            "underflow": underflow,
            "underflow_crest_corr": covariance / np.sqrt(spread.where(spread > 0)),
            **{f"coverage_{k}": s[f"sum_e2_top{k}"] / e2 for k in (1, 5, 10)},
            **{f"sparse_{k}": s[f"sum_e2_sparse{k}"] / e2 for k in (1, 5, 10)},
            "transposition": np.sqrt(s["sum_transposed2"] / s["sum_tile2"].where(s["sum_tile2"] > 0)),
        }
    ).reset_index()


def representations(layers: pd.DataFrame) -> pd.DataFrame:
    """Return `module`, `snr_db`, `injected`, `propagated` per Linear of a `layers` frame, in order of the calls."""
    kinds = layers["comparison"].astype(str)
    rows = layers[kinds.isin(("injected", "propagated", "error"))].assign(kind=kinds)
    grouped = rows.groupby([rows["layer"].astype(str), "kind"], sort=False)[["ref2", "diff2"]].sum()
    part = (grouped["diff2"] / grouped["ref2"].where(grouped["ref2"] > 0)).unstack("kind")
    depth = rows.groupby(rows["layer"].astype(str))["depth"].min().sort_values(kind="stable")
    part = part.reindex(index=depth.index, columns=["injected", "propagated", "error"])
    values = {"snr_db": -10.0 * np.log10(part["error"].where(part["error"] > 0))}
    found = pd.DataFrame({**values, "injected": part["injected"], "propagated": part["propagated"]})
    return found.rename_axis("module").reset_index()


def basin_cosines(replay_gradients: pd.DataFrame) -> pd.DataFrame:
    """Return the columns `module`, `basin_cosine` of a `replay_gradients` frame; empty without the arm `q_weights`."""
    rows = replay_gradients[(replay_gradients["arm"].astype(str) == "q_weights").to_numpy()]
    names = ["ref2", "err2", "ref_err", "sum_grad_step", "sum_step2"]
    s = rows.groupby(rows["module"].astype(str), sort=False)[names].sum(min_count=1).astype(float)
    sizes = (s["ref2"] + s["err2"] + 2.0 * s["ref_err"]) * s["sum_step2"]
    return (s["sum_grad_step"] / np.sqrt(sizes.where(sizes > 0))).rename("basin_cosine").reset_index()


def relative_drift(rollouts: pd.DataFrame) -> tuple[float, float]:
    """Return mean |p_rollout - p_train| per token in the first and in the last quarter of a `rollouts` frame's steps.

    All tokens of one source count; NaN with fewer than `MIN_DRIFT_STEPS` steps.
    """
    rows = all_tokens(rollouts)
    steps = rows.groupby("step", sort=True)[["sum_abs_dp", "n_tokens"]].sum()
    steps = steps[steps["n_tokens"] > 0]
    if len(steps) < MIN_DRIFT_STEPS:
        return float("nan"), float("nan")
    quarter = len(steps) // 4
    first, last = (part.sum() for part in (steps.iloc[:quarter], steps.iloc[-quarter:]))
    return float(first["sum_abs_dp"] / first["n_tokens"]), float(last["sum_abs_dp"] / last["n_tokens"])
