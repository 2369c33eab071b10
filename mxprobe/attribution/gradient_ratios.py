"""What quantized operands do to the gradient, and whether there is a gradient to speak of (science, section 6).

    relative_l2 = ||D|| / ||g||      cosine = <g, g + D> / (||g|| ||g + D||)      D: error, g: exact gradient
    log2_norm_ratio = log2(||g + D|| / ||g||)      projection_gain = <g, g + D> / ||g||^2
    half_cosine = <a, b> / (||a|| ||b||)      sampling_noise = ||a - b||^2 / ||g||^2      g = a + b over tokens

Near convergence the gradient is noise: below the gates the rows are marked and nothing is attributed to them.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

MIN_HALF_COSINE = 0.1
MAX_SAMPLING_NOISE = 0.9
_SUMS = ["ref2", "err2", "ref_err"]
_HALVES = ["half_a2", "half_b2", "half_ab"]


def gradient_ratios(
    gradients: pd.DataFrame,
    by: Sequence[str] = ("module", "gemm", "component"),
    *,
    min_half_cosine: float = MIN_HALF_COSINE,
    max_sampling_noise: float = MAX_SAMPLING_NOISE,
) -> pd.DataFrame:
    """Return the ratios per group of a `gradients` frame: sums added over steps and ranks first, divided last.

    Columns beside the keys: `relative_l2`, `cosine`, `log2_norm_ratio`, `projection_gain`, `half_cosine`,
    `sampling_noise` and `is_withheld`: the halves disagree or the noise is of the gradient's own size, so that its
    error must not be attributed. False where there are no halves (dgrad).
    """
    grouped = gradients.groupby(list(by), observed=True, sort=True)
    sums = grouped[[*_SUMS, *_HALVES]].sum(min_count=1)
    ref2 = sums["ref2"].to_numpy(dtype=float)
    a2, b2, ab = (sums[name].to_numpy(dtype=float) for name in _HALVES)
    with np.errstate(divide="ignore", invalid="ignore"):
        half_cosine = ab / np.sqrt(a2 * b2)
        noise = (a2 + b2 - 2.0 * ab) / ref2
        halves = {
            "half_cosine": half_cosine,
            "sampling_noise": noise,
            "is_withheld": (half_cosine < min_half_cosine) | (noise > max_sampling_noise),
        }
    return error_ratios(sums).assign(**halves).reset_index()


def error_ratios(sums: pd.DataFrame) -> pd.DataFrame:
    """Return `relative_l2`, `cosine`, `log2_norm_ratio`, `projection_gain` of added `ref2`, `err2`, `ref_err`.

    Same index.
    """
    ref2, err2, ref_err = (sums[name].to_numpy(dtype=float) for name in _SUMS)
    with np.errstate(divide="ignore", invalid="ignore"):
        with_error2 = ref2 + 2.0 * ref_err + err2
        return pd.DataFrame(
            {
                "relative_l2": np.sqrt(err2 / ref2),
                "cosine": (ref2 + ref_err) / np.sqrt(ref2 * with_error2),
                "log2_norm_ratio": 0.5 * np.log2(with_error2 / ref2),
                "projection_gain": 1.0 + ref_err / ref2,
            },
            index=sums.index,
        )
