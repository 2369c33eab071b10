"""Numbers in the page are float32 of what they were; fewer of them only by whole bins."""

import base64
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mxprobe_reports import packing


def test_pack_is_little_endian_float32_and_json() -> None:
    packed = json.loads(json.dumps(packing.pack([[1.0, np.inf], [-2.5, np.nan]])))
    back = np.frombuffer(base64.b64decode(packed["f32"]), dtype="<f4").reshape(packed["shape"])
    np.testing.assert_array_equal(back, np.array([[1.0, np.nan], [-2.5, np.nan]], dtype=np.float32))


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_bins_are_full_in_order_and_even(n_steps: int, n_bins: int) -> None:
    n_bins = min(n_steps, n_bins)
    bins = packing.bin_of(n_steps, n_bins)
    sizes = np.bincount(bins, minlength=n_bins)
    assert len(bins) == n_steps
    assert np.all(np.diff(bins) >= 0)
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1


def test_few_series_keep_every_step_many_stay_within_the_budget() -> None:
    assert packing.display_bins(250, 84 * 9) == 250
    assert packing.display_bins(9000, 10) == packing.MAX_POINTS
    n_series = 1344 * 9
    assert packing.display_bins(2000, n_series) * n_series <= packing.MAX_SERIES_FLOATS
    assert packing.display_bins(2000, 10**9) == 8
    assert packing.display_bins(0, 0) == 0
