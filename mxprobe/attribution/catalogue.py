"""The columns of neighbouring papers in this trace: each with definition, source, unit, and why it is missing if it is.

Values are per module (and operand), summed over steps first and divided last; here their median and the range of the
middle 80 % over modules. The functions of `neighbours` and `updates` give them one by one.
"""

import math
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from mxprobe.schema import CODE_BINS, Role
from mxprobe.trace import Trace
from mxprobe.trace.aggregation import Aggregation
from mxprobe.trace.arrow import columns_of

from . import neighbours
from .recommendation import PaperColumn
from .update_visibility import update_ratios

NO_REPLAY = "no replay in this trace: attach with --replay-every N"
OLDER = "this trace was made by an older version"
PLACE = ("module", "role", "phase")
DEFINITIONS: dict[str, dict[str, str]] = tomllib.loads(
    (files("mxprobe.attribution") / "paper_columns.toml").read_text(encoding="utf-8")
)
"""Column -> `definition`, `unit`, `source`."""


def catalogue(trace: Trace) -> tuple[PaperColumn, ...]:
    """Return all columns in the order of `DEFINITIONS`."""
    found = dict(_found(trace))
    return tuple(
        _summary(name, *found[name]) if name in found else _column(name, withheld=OLDER) for name in DEFINITIONS
    )


Found = tuple[str, tuple[pd.DataFrame, str]]
"""A column: (rows of `place` and `value`, why there are none)."""


def _found(trace: Trace) -> Iterator[Found]:
    yield from _of_operands(trace)
    updates = trace.table("updates")
    why = "no two neighbouring versions of a weight were watched"
    ratios = update_ratios(updates) if len(updates) else pd.DataFrame({"module": []})
    for name in ("code_flip_frac", "return_frac", "near_frac", "r_w"):
        yield name, (_rows(ratios, ("module",), name), why)
    yield from _of_replays(trace)
    x, y = neighbours.relative_drift(trace.rollouts())
    why = f"fewer than {neighbours.MIN_DRIFT_STEPS} steps with log-probabilities of both sides"
    yield "relative_drift", (_one("run", y / x if x > 0 else math.nan), why)


def _of_operands(trace: Trace) -> Iterator[Found]:
    hists = _histograms(trace)
    nothing = "no operand was measured" if hists.empty else OLDER
    yield "bucket_ratio", (_rows(neighbours.bucket_ratios(hists), PLACE, "bucket_ratio"), nothing)
    forward = {"role": (Role.X_FWD.value, Role.W_FWD.value)}
    pairs = trace.sums(Aggregation("tensors", ("step", *PLACE, "rank"), ("sum_x2", "sum_e2", "out_e2"), forward))
    aligned = neighbours.alignments(pairs, trace.modules())
    why = "no step in which inputs and weights of one Linear were both measured"
    yield "alignment", (_rows(aligned, PLACE, "alignment"), why)
    sums = tuple(name for name in columns_of("blocks") if name.startswith(("sum_", "n_")))
    blocks = trace.sums(Aggregation("blocks", PLACE, sums))
    ratios = neighbours.block_ratios(blocks)
    with_weights = (blocks["role"].astype(str) == Role.W_DGRAD.value).any()
    for name in DEFINITIONS:
        if name == "transposition":
            why = OLDER if with_weights else "no probed step held a weight and the gradient at its output"
            yield name, (_rows(ratios, PLACE, name), why)
        elif name.startswith(("crest", "underflow", "coverage_", "sparse_")):
            yield name, (_rows(ratios, PLACE, name), nothing)


def _histograms(trace: Trace) -> pd.DataFrame:
    """Return columns of `PLACE` and `code_hist` (float64 [16]), added by pieces: they are most of a large table."""
    parts = [pd.DataFrame({name: [] for name in (*PLACE, "code_hist")})]
    for piece in trace.chunks("tensors", (*PLACE, "code_hist")):
        rows = piece.filter(piece.column("code_hist").is_valid())
        if rows.num_rows:
            group = rows.select(PLACE).to_pandas().groupby(list(PLACE), observed=True)
            counts = rows.column("code_hist").combine_chunks().flatten().to_numpy().reshape(-1, CODE_BINS)
            sums = pd.DataFrame(counts.astype(float)).groupby(group.ngroup().to_numpy()).sum().to_numpy()
            parts.append(group.size().reset_index()[list(PLACE)].astype(str).assign(code_hist=list(sums)))
    return pd.concat(parts, ignore_index=True)


def _of_replays(trace: Trace) -> Iterator[Found]:
    replays = trace.replays()
    why = NO_REPLAY if replays.empty else OLDER
    layers = neighbours.representations(trace.layers())
    for name in ("snr_db", "injected", "propagated"):
        yield name, (_rows(layers, ("module",), name), why)
    point = replays[replays["arm"].astype(str) == "q_weights"]
    if len(replays) and point.empty:
        why = "no replay of the arm q_weights in this trace"
    backward = "replays ran forwards only: no gradient was known at the policy" if len(point) else why
    cosines = neighbours.basin_cosines(trace.table("replay_gradients"))
    yield "basin_cosine", (_rows(cosines, ("module",), "basin_cosine"), backward)
    no_loss = "the model returns no loss of its own: see basin_policy_loss" if len(point) else why
    yield "basin_loss", (_one("mean of the microbatches", point["loss_shift"].mean()), no_loss)
    yield "basin_policy_loss", (_one("mean of the microbatches", point["policy_loss_shift"].mean()), backward)


def _rows(frame: pd.DataFrame, place: tuple[str, ...], name: str) -> pd.DataFrame:
    if name not in frame:
        return pd.DataFrame({"place": [], "value": []})
    known = frame[np.isfinite(frame[name].to_numpy(dtype=float))]
    places = [" ".join(str(part) for part in row) for row in known[list(place)].itertuples(index=False, name=None)]
    return pd.DataFrame({"place": places, "value": known[name].to_numpy(dtype=float)})


def _one(place: str, value: float) -> pd.DataFrame:
    known = math.isfinite(value)
    return pd.DataFrame({"place": [place] if known else [], "value": [float(value)] if known else []})


def _column(name: str, **values: Any) -> PaperColumn:
    words = DEFINITIONS[name]
    return PaperColumn(name, words["definition"], words["source"], words["unit"], **values)


def _summary(name: str, rows: pd.DataFrame, why: str) -> PaperColumn:
    if rows.empty:
        return _column(name, withheld=why)
    value = rows["value"].to_numpy(dtype=float)
    low, median, high = (float(q) for q in np.quantile(value, (0.1, 0.5, 0.9)))
    largest = str(rows["place"].iloc[int(value.argmax())])
    return _column(name, median=median, low=low, high=high, n=len(value), largest=largest)
