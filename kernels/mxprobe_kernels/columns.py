"""Names of what a decomposition stores: sums, counts and histograms (never ratios, so that they can be added).

`mxprobe.schema` gives them their columns in the trace. Standard library only and Python 3.9 syntax: shipped.
"""

ENERGY_SUMS: tuple[str, ...] = (
    "sum_x2",
    "sum_e2",
    "sum_scale2",
    "sum_dz2",
    "sum_grid2",
    "sum_scale_grid",
    "sum_scale_dz",
    "sum_xq",
    "sum_xqstar",
    "sum_e",
    "sum_sat2",  # energy of e_scale where |x| > 6 s: the fourth term of rules that can saturate
    "sum_e2_on_d",  # total error energy on the deadzone D
    "sum_e2_zeroed",  # total error energy where Q = 0, x != 0 (realised split)
    "sum_e2_saturated",  # total error energy where |x| > 6 s (realised split)
)
COUNTS: tuple[str, ...] = (
    "n",
    "n_deadzone",
    "n_zeroed",
    "n_zeroed_by_scale",  # zeroed although Q* is not: the power-of-two scale's doing
    "n_saturated",
    "n_clamped",  # blocks whose scale left E8M0's range
    "n_nonfinite",
    "n_blocks",
    "n_blocks_excluded",
)
DELTA_BINS = 32
CODE_BINS = 16
