"""Error of the weight gradients with both operands rounded, beside the sampling noise of the gradient itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from mxprobe.attribution.gradient_ratios import MAX_SAMPLING_NOISE, MIN_HALF_COSINE, gradient_ratios
from mxprobe.plain_data import plain_data
from mxprobe.schema import COMPONENTS

from .rows import Rows

GEMM = "wgrad"
_KEYS = ("module", "gemm", "component")
_SUMS = ("ref2", "err2", "ref_err", "half_a2", "half_b2", "half_ab")


def collect(rows: Rows, modules: Sequence[str]) -> pd.DataFrame:
    """Return one row per module with a measured dW, in model order.

    Columns: `module` (position in `modules`); `total`, `scale`, `deadzone`, `grid`: ||error of dW||^2 / ||dW||^2 with
    that part in both operands; `noise`: sampling noise of the same dW, relative; `is_withheld`: it is mostly noise.
    """
    parts = [
        piece.to_pandas().groupby(list(_KEYS), observed=True)[list(_SUMS)].sum(min_count=1).reset_index()
        for piece in rows.chunks((*_KEYS, *_SUMS))
    ]
    names = ["module", *COMPONENTS, "noise", "is_withheld"]
    if not parts:
        return pd.DataFrame(columns=names)
    sums = pd.concat([part.astype(dict.fromkeys(_KEYS, str)) for part in parts], ignore_index=True)
    found = gradient_ratios(sums[sums["gemm"] == GEMM])
    place = {name: i for i, name in enumerate(modules)}
    found["at"] = [place.get(str(name), -1) for name in found["module"]]
    found = found[found["at"] >= 0].assign(error2=lambda frame: frame["relative_l2"] ** 2)
    wide = found.pivot(index="at", columns="component", values="error2").reindex(columns=list(COMPONENTS))
    total = found[found["component"] == "total"].set_index("at")
    wide["noise"] = total["sampling_noise"]
    wide["is_withheld"] = total["is_withheld"]
    wide["is_withheld"] = wide["is_withheld"].eq(True)
    return wide.rename_axis(index="module", columns=None).reset_index()[names]


def page_data(found: pd.DataFrame) -> dict[str, Any] | None:
    """Return the errors for page.js; None where no dW was measured."""
    if found.empty:
        return None
    return {
        "module": [int(m) for m in found["module"]],
        **{name: plain_data(found[name].tolist()) for name in (*COMPONENTS, "noise")},
        "withheld": [bool(v) for v in found["is_withheld"]],
    }


def sentence(found: pd.DataFrame) -> str:
    """Say how the error compares with the noise, and what is withheld."""
    if found.empty:
        return (
            "Beside it belongs the sampling noise of the gradient, which was not measured here: no microbatch of a "
            "weight gradient was captured."
        )
    error, noise = (float(np.nanmedian(found[name].to_numpy(dtype=float))) for name in ("total", "noise"))
    compared = f"over {len(found)} modules the median error is {error:.2g}, the median sampling noise {noise:.2g}"
    withheld = int(found["is_withheld"].sum())
    gate = (
        f" In {withheld} of them the gradient is mostly noise (its halves agree by less than {MIN_HALF_COSINE:g}, or "
        f"the noise exceeds {MAX_SAMPLING_NOISE:g} ‖dW‖²): nothing is attributed to rounding there."
    )
    return f"With both rounded (squares), {compared}, relative to ‖dW‖².{gate if withheld else ''}"
