"""The trace's vocabulary: enumerations and shared names. `mxprobe.tables` has the tables and columns.

Standard library only and Python 3.9 syntax: the agent ships this file. Arrow types are made on demand by
`mxprobe.trace`, from the type names used here.
"""

from typing import Any

from mxprobe_kernels.columns import CODE_BINS as CODE_BINS
from mxprobe_kernels.columns import COUNTS as COUNTS
from mxprobe_kernels.columns import DELTA_BINS as DELTA_BINS
from mxprobe_kernels.columns import ENERGY_SUMS as ENERGY_SUMS
from mxprobe_kernels.formats import Name
from mxprobe_kernels.formats import Rule as Rule

SCHEMA_VERSION = 1
"""Counts changes that an older reader cannot cope with: it refuses the trace."""
SCHEMA_MINOR = 2
"""Counts additions that an older reader can ignore: a table, a column, a value of an enumeration. See docs/trace.md."""


class Role(Name):
    """A GEMM operand, named by tensor and by the GEMM that consumes it."""

    X_FWD = "x_fwd"
    W_FWD = "w_fwd"
    G_DGRAD = "g_dgrad"
    W_DGRAD = "w_dgrad"
    G_WGRAD = "g_wgrad"
    X_WGRAD = "x_wgrad"


class Phase(Name):
    TRAIN = "train"
    ROLLOUT = "rollout"
    EVAL = "eval"


class Component(Name):
    SCALE = "scale"
    DEADZONE = "deadzone"
    GRID = "grid"
    SATURATION = "saturation"
    MIXED = "mixed"
    NONE = "none"


class Verdict(Name):
    """The outcome of `recommend`. `PLAIN_WORDS` gives the sentence a person reads."""

    NOTHING_QUANTIZED = "nothing_quantized"
    NOT_ENOUGH_EVIDENCE = "not_enough_evidence"
    NONE_NEEDED = "none_needed"
    NOT_EXPLAINED = "not_explained"
    ENABLE = "enable"
    UNDECIDED = "undecided"
    KEEP_HIGH_PRECISION = "keep_high_precision"


PLAIN_WORDS: dict[Verdict, str] = {
    Verdict.NOTHING_QUANTIZED: "nothing is quantized here",
    Verdict.NOT_ENOUGH_EVIDENCE: "not enough evidence",
    Verdict.NONE_NEEDED: "none needed",
    Verdict.NOT_EXPLAINED: "not explained by MXFP4 rounding",
    Verdict.ENABLE: "enable a correction",
    Verdict.UNDECIDED: "undecided between corrections",
    Verdict.KEEP_HIGH_PRECISION: "keep in high precision",
}

Row = dict[str, Any]
"""One row of a table, by column: what the parts of the agent hand over and the writer puts into columns."""
TableRow = tuple[str, Row]
"""The name of a table, and a row of it."""

COMPONENTS = ("total", "scale", "deadzone", "grid")
"""Values of column `component` where an error is split: the whole, and its parts."""
ENGINES = ("arrow", "duckdb", "ray")
"""What large tables are summed with: see mxprobe.trace.summing."""

WEIGHT_CODES = "weight_codes"
"""Table of hashes of weights. Its column `form` has the values below."""
AS_HELD, TRANSPOSED, NOT_COMPARABLE, BF16 = "held", "transposed", "not comparable", "bf16"
ROUNDED: tuple[str, ...] = ("mxfp4+rceil", "mxfp4+floor", "mxfp4+even")
"""How an engine may have rounded the trainer's weights."""
OF_BF16 = " of bf16"
"""After one of these: of weights in float32 that were sent in bfloat16."""

DEFAULT_ARMS: tuple[str, ...] = ("high", "q", "qstar", "qstar_dz", "mxfp8", "noise", "flip", "q_weights")
"""Counterfactual forwards of a replay: `mxprobe.measuring.replay.arms` says what each is."""
