"""How much of the work was seen, and what was not and why."""

import numpy as np
import pandas as pd

from mxprobe.attribution import Recommendation

from .markup import Html, basis, card, percent, scope, table, tag

MAX_NOT_SEEN = 40
NOT_REPLAYED = "no place in replays"
"""In the reason of a module that the agent measures and does not replay."""


def section(recommendation: Recommendation, modules: pd.DataFrame) -> Html:
    coverage = recommendation.coverage
    kind = tag("span", scope("steps", "rank", "operands"), basis("measured", "forward FLOPs of weight GEMMs"))
    title = "Coverage"
    if coverage.flops_frac is None:
        why = "The trace lists no module with a weight GEMM, so the share of the work seen is not known."
        return card(title, tag("p", why, class_="empty"), kind=kind)
    frac = coverage.flops_frac
    headline = tag("p", percent(frac), class_="big")
    words = tag(
        "p",
        f"0 % covered, because {coverage.because}"
        if coverage.because
        else f"of the weight-GEMM work was in {coverage.n_probed} probed modules, of {coverage.n_modules}.",
        class_="note",
    )
    meter = tag(
        "div", tag("i", style=f"width: {100 * min(max(frac, 0.0), 1.0):.2f}%"), class_="meter", role="img",
        aria_label=f"{percent(frac)} of the work seen",
    )  # fmt: skip
    return card(title, headline, words, meter, _not_replayed(modules), _not_seen(modules), kind=kind)


def _not_replayed(modules: pd.DataFrame) -> Html:
    """Modules whose operands are measured and that replays leave as they are."""
    told = modules["reason"].fillna("").astype(str).str.contains(NOT_REPLAYED, regex=False)
    names = modules.loc[told & (modules["status"].astype(str) == "probed"), "module"].astype(str).nunique()
    if not names:
        return Html("")
    words = (
        f"{names} of them are no nn.Linear (fused experts, routers, other libraries' layers): measured, but without a "
        "predicted KL, as replays compute nn.Linear alone."
    )
    return tag("p", words, class_="note")


def _not_seen(modules: pd.DataFrame) -> Html:
    if modules.empty:
        return Html("")
    flops = pd.to_numeric(modules["gemm_flops"]).astype(float)
    whole = float(flops.sum())
    frame = modules.assign(flops=flops)[(modules["status"].astype(str) != "probed").to_numpy()]
    frame = frame.sort_values("flops", ascending=False)
    if frame.empty:
        return tag("p", "Nothing was left out.", class_="note")
    rows = [
        [
            tag("code", row["module"]),
            row["class_name"],
            percent(row["flops"] / whole if whole > 0 else np.nan),
            row["reason"] or row["status"],
        ]
        for row in frame.head(MAX_NOT_SEEN).to_dict("records")
    ]
    rest = len(frame) - len(rows)
    more = tag("p", f"{rest} more are in the modules table of the trace.", class_="note") if rest > 0 else ""
    title = tag("h3", "Not seen", style="margin-top: 6px")
    return title + table(["module", "class", "work", "why"], rows, numeric=(2,)) + more
