"""What the run shows: reward, entropy, mismatch and gradient norm over steps, with what happened marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from markupsafe import Markup

from mxprobe.metrics import Series, preferred
from mxprobe.numbers import number, percent

from . import changes, logprobs, packing
from .changes import Change
from .inputs import Inputs
from .rendering import render

RECENT = 0.1
"""The value shown is the mean of this last part of the run."""


@dataclass(frozen=True)
class Signal:
    """One line. `steps` int64 and `values` float64, one value per step, at most 2,000 of them."""

    id: str
    title: str
    detail: str
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    from_zero: bool
    missing: str
    is_share: bool = False
    change: Change | None = None

    def show(self, value: float) -> str:
        """Spell a value of this signal."""
        return percent(value) if self.is_share else number(value)

    @property
    def recent(self) -> float:
        """Mean of the finite values in the last tenth of the steps."""
        return _mean_of_part(self.values[::-1])

    @property
    def first(self) -> float:
        return _mean_of_part(self.values)


def _mean_of_part(values: npt.NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    part = finite[: max(1, round(RECENT * len(finite)))]
    return float(part.mean()) if len(part) else float("nan")


HEADLINE: tuple[tuple[str, str, str], ...] = (
    # id, canonical metric, title
    ("reward", "reward_mean", "Reward"),
    ("entropy", "entropy", "Entropy"),
    ("grad-norm", "grad_norm", "Gradient norm"),
)


MARKED_EVENTS: tuple[str, ...] = (
    *("attached", "detached", "nonfinite", "flight", "error", "emulation", "recipe", "weight_sync", "weight_noise"),
    *("checkpoint_saved", "checkpoint_loaded", "resume", "rank_lost"),
)
MAX_MARKS = 12
"""Events of one kind beyond which its marks would hide the curves: they are then in the table of events alone."""
_DETAIL_CHARACTERS = 80


def marked_events(events: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the events to draw on the curves, in the order of steps: `step`, `kind` and the beginning of `detail`."""
    kinds = events["kind"].astype(str)
    counts = kinds.value_counts()
    drawn = [kind for kind in MARKED_EVENTS if 0 < counts.get(kind, 0) <= MAX_MARKS]
    rows = events[kinds.isin(drawn).to_numpy() & np.isfinite(events["step"].to_numpy(dtype=float))]
    return [
        {"step": int(step), "kind": str(kind), "detail": str(detail or "")[:_DETAIL_CHARACTERS]}
        for step, kind, detail in rows.sort_values("step", kind="stable")[["step", "kind", "detail"]].itertuples(
            index=False, name=None
        )
    ]


def headline_signals(inputs: Inputs, by_step: pd.Series) -> list[Signal]:
    """Return reward, entropy, mismatch and gradient norm, in this order, empty where there is none.

    The mismatch is mean |log p rollout - log p trainer| of the sampled tokens, in nats, where it was measured. Else
    it is `by_step`: the median over modules of |realised error in rollout - in training|, relative and squared.
    """
    reward, entropy, norm = (_metric(inputs.signals, *spec) for spec in HEADLINE)
    by_token = logprobs.mismatch_by_step(inputs.rollouts)
    if len(by_token):
        return [reward, entropy, _signal("mismatch", "Mismatch of log p", "nats a token", by_token), norm]
    why = "Training and rollout were not both seen in this trace."
    return [reward, entropy, _signal("mismatch", "Mismatch", "|rollout − training|", by_step, why, is_share=True), norm]


def _metric(signals: pd.DataFrame, id: str, metric: str, title: str) -> Signal:
    rows = signals[(signals["metric"].astype(str) == metric).to_numpy()]
    if rows.empty:
        return _signal(id, title, "", pd.Series(dtype=float), "Not logged in this trace.")
    rows = _one_series(rows)
    by_step = rows.groupby("step")["value"].mean().sort_index()
    return _signal(id, title, f"logged as {rows['raw_key'].astype(str).iloc[-1]}", by_step)


def _one_series(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the one series to show: keys and loggers that mean the same are no further samples."""
    keys = rows[["source", "framework", "raw_key"]].astype(str)
    chosen = preferred(Series(*key) for key in keys.drop_duplicates().itertuples(index=False, name=None))
    if chosen is None:
        return rows
    same = [keys[name] == value for name, value in vars(chosen).items()]
    return rows[(same[0] & same[1] & same[2]).to_numpy()]


def _signal(
    id: str, title: str, detail: str, by_step: pd.Series, missing: str = "", *, is_share: bool = False
) -> Signal:
    n_steps = len(by_step)
    steps, values = resampled(by_step)
    if n_steps > len(values):
        detail += f", {n_steps} steps shown as {len(values)} means"
    if n_steps and not np.isfinite(values).any():
        missing = "Every logged value is NaN or infinite."
        steps, values = steps[:0], values[:0]
    return Signal(id, title, detail, steps, values, True, missing, is_share, changes.find(steps, values))


def resampled(by_step: pd.Series) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return steps and values of a series by step; beyond 2,000 points, means of neighbouring steps."""
    steps, values = by_step.index.to_numpy().astype(np.int64), by_step.to_numpy(dtype=float)
    if len(steps) <= packing.MAX_POINTS:
        return steps, values
    bins = pd.Series(packing.bin_of(len(steps), packing.MAX_POINTS))
    return pd.Series(steps).groupby(bins).first().to_numpy(), pd.Series(values).groupby(bins).mean().to_numpy()


def page_data(signals: Sequence[Signal], others: Sequence[Signal] = ()) -> list[dict[str, Any]]:
    """Return the signals with values, for page.js; `smooth` is a centred running mean over 1/20 of the steps.

    `others` are the same signals of the run that is laid over this one.
    """
    data: list[dict[str, Any]] = []
    against = {
        other.id: {"steps": packing.pack(other.steps), "values": packing.pack(_smooth(other.values))}
        for other in others
        if len(other.steps)
    }
    for signal in signals:
        if not len(signal.steps):
            continue
        smooth = _smooth(signal.values) if len(signal.values) // 20 >= 3 else None
        data.append(
            {
                "id": signal.id,
                "title": signal.title,
                "from_zero": signal.from_zero,
                "is_share": signal.is_share,
                "step": _step(signal.change),
                "against": against.get(signal.id),
                "steps": packing.pack(signal.steps),
                "values": packing.pack(signal.values),
                "smooth": None if smooth is None else packing.pack(smooth),
            }
        )
    return data


def _step(change: Change | None) -> dict[str, Any] | None:
    """Return where the line has a step, and how sure that is."""
    return None if change is None or change.step is None else {"at": change.at, "p": change.step.p}


def _smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    width = max(len(values) // 20, 1)
    return pd.Series(values).rolling(width, center=True, min_periods=1).mean().to_numpy(dtype=float)


def section(signals: Sequence[Signal]) -> Markup:
    """Return a card per signal."""
    return render("signals.html", signals=signals)


def all_signals(frame: pd.DataFrame) -> Markup:
    """Return every logged key with its canonical name; the raw series are one `mxprobe.open_trace` away."""
    rows: list[list[object]] = []
    for key, group in frame.groupby(frame["raw_key"].astype(str), sort=True):
        value = group["value"].to_numpy(dtype=float)
        finite = value[np.isfinite(value)]
        last = group.iloc[-1]
        name = str(last["metric"]) if pd.notna(last["metric"]) else ""
        spread = [finite[-1], finite.min(), finite.max()] if len(finite) else [None] * 3
        rows.append([name or "not mapped", str(key), str(last["source"]), len(value), *map(number, spread)])
    return render("all_signals.html", rows=rows)
