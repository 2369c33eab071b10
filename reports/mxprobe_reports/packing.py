"""Numbers for the page: packed float32, and fewer of them than the trace holds where that is only for display."""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_POINTS = 2000
"""Points of one line that an SVG chart still draws at once."""
MAX_SERIES_FLOATS = 650_000
"""Floats of all operands' series together: 3.5 MB of base64, so that the page stays under 10 MB."""


def pack(values: npt.ArrayLike) -> dict[str, Any]:
    """Return base64 of little-endian float32 and the shape. Infinities become NaN: a chart can show neither."""
    array = np.asarray(values, dtype=np.float64)
    array = np.where(np.isfinite(array), array, np.nan).astype("<f4")
    return {"f32": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(), "shape": list(array.shape)}


def display_bins(n_steps: int, n_series: int, max_floats: int | None = None) -> int:
    """Return into how many bins the steps go so that `n_series` lines fit the page; at least 8, or all steps."""
    affordable = (max_floats or MAX_SERIES_FLOATS) // max(n_series, 1)
    return min(n_steps, max(8, min(affordable, MAX_POINTS)))


def bin_of(n_steps: int, n_bins: int) -> npt.NDArray[np.int64]:
    """Return the bin of each step: (n_steps,) int64, equal widths, every bin non-empty for n_bins <= n_steps."""
    return np.arange(n_steps, dtype=np.int64) * n_bins // max(n_steps, 1)
