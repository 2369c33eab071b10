"""How much of the work was seen, and what was not and why."""

import numpy as np
import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import Recommendation
from mxprobe.numbers import percent

from .rendering import render

MAX_NOT_SEEN = 40
NOT_REPLAYED = "no place in replays"
"""In the reason of a module that the agent measures and does not replay."""


def section(recommendation: Recommendation, modules: pd.DataFrame) -> Markup:
    """Return the card; `modules` is the modules table of the trace."""
    status, reason = modules["status"].astype(str), modules["reason"].fillna("").astype(str)
    not_replayed = reason.str.contains(NOT_REPLAYED, regex=False) & (status == "probed")
    flops = pd.to_numeric(modules["gemm_flops"]).astype(float)
    shares = flops / (flops.sum() if flops.sum() > 0 else np.nan)
    frame = modules.assign(share=shares)[(status != "probed").to_numpy()]
    frame = frame.sort_values("gemm_flops", ascending=False, key=pd.to_numeric)
    return render(
        "coverage.html",
        coverage=recommendation.coverage,
        has_modules=not modules.empty,
        n_not_replayed=modules.loc[not_replayed, "module"].astype(str).nunique(),
        not_seen=[
            [row["module"], row["class_name"], percent(row["share"]), row["reason"] or row["status"]]
            for row in frame.head(MAX_NOT_SEEN).to_dict("records")
        ],
        n_more=len(frame) - MAX_NOT_SEEN,
    )
