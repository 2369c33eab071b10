"""Rows that add up old steps (`mxprobe.trace.thinning`), and which of them a step of another table belongs to."""

import numpy as np
import numpy.typing as npt
import pandas as pd

Steps = npt.NDArray[np.int64]


def spanned(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with `n_steps` and `last_step`: 1 and their own step where they say nothing."""
    own = {"n_steps": 1, "last_step": frame["step"]}
    return frame.assign(**{name: value for name, value in own.items() if name not in frame.columns})


def last_steps(frame: pd.DataFrame) -> pd.Series:
    """Return, by ascending `step`, the last step that its rows add up."""
    return spanned(frame).groupby("step", sort=True)["last_step"].max()


def window_of(steps: Steps, first: Steps, last: Steps) -> Steps:
    """Return the index of the window `first` (ascending) to `last` that holds each step; -1 where none does."""
    if not first.size:
        return np.full(len(steps), -1, dtype=np.int64)
    index = np.searchsorted(first, steps, side="right") - 1
    return np.where((index >= 0) & (steps <= last[index]), index, -1).astype(np.int64)
