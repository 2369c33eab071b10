"""How much of the work was seen, and what was not and why; what the probe cost."""

import numpy as np
import pandas as pd

from mxprobe.attribution import Recommendation

from .markup import Html, basis, bytes_text, card, duration_text, pairs, percent, table, tag

MAX_NOT_SEEN = 40


def section(recommendation: Recommendation, modules: pd.DataFrame, overhead: pd.DataFrame) -> Html:
    return tag("div", _coverage(recommendation, modules), _overhead(overhead), class_="row two", id="coverage")


def _coverage(recommendation: Recommendation, modules: pd.DataFrame) -> Html:
    coverage = recommendation.coverage
    title, kind = "Coverage", basis("measured", "forward FLOPs of weight GEMMs")
    if coverage.flops_frac is None:
        why = "The trace lists no module with a weight GEMM, so the share of the work seen is not known."
        return card(title, tag("p", why, class_="empty"), kind=kind)
    frac = coverage.flops_frac
    headline = tag("p", percent(frac), class_="big")
    words = tag(
        "p",
        f"of the weight-GEMM work was in {coverage.n_probed} probed modules, of {coverage.n_modules}.",
        class_="note",
    )
    meter = tag(
        "div", tag("i", style=f"width: {100 * min(max(frac, 0.0), 1.0):.2f}%"), class_="meter", role="img",
        aria_label=f"{percent(frac)} of the work seen",
    )  # fmt: skip
    return card(title, headline, words, meter, _not_seen(modules), kind=kind)


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


def _overhead(overhead: pd.DataFrame) -> Html:
    title, kind = "Overhead", basis("measured")
    step_ns = pd.to_numeric(overhead["step_ns"]).astype(float).to_numpy()
    probe_ns = pd.to_numeric(overhead["probe_ns"]).astype(float).to_numpy()
    timed = np.isfinite(step_ns) & np.isfinite(probe_ns) & (step_ns > 0)
    if not timed.any():
        return card(title, tag("p", "No step was timed in this trace.", class_="empty"), kind=kind)
    probed = overhead["probed"].fillna(False).astype(bool).to_numpy() & timed
    training = step_ns[timed].sum() - probe_ns[timed].sum()
    share = probe_ns[timed].sum() / training if training > 0 else np.nan
    plain = timed & ~probed
    last = overhead.sort_values("time_ns").groupby("rank" if "rank" in overhead else overhead.index * 0).last()
    ended = {name: float(pd.to_numeric(last[name]).sum()) for name in ("n_dropped", "n_errors", "sent_bytes")}
    entries = [
        ("steps timed", f"{int(timed.sum())}, {int(probed.sum())} of them probed"),
        ("step without probing, median", _median(step_ns[plain])),
        ("step with probing, median", _median(step_ns[probed])),
        ("time in our hooks, probed step", _median(probe_ns[probed])),
        ("time in our hooks, other step", _median(probe_ns[plain])),
        ("rows dropped", f"{ended['n_dropped']:.0f}"),
        ("errors swallowed", f"{ended['n_errors']:.0f}"),
        ("sent", bytes_text(ended["sent_bytes"])),
    ]
    headline = tag("p", percent(float(share)), class_="big")
    words = tag(
        "p",
        "added to the training time while attached: time in our hooks over the rest of the steps' time.",
        class_="note",
    )
    return card(title, headline, words, pairs(entries), kind=kind)


def _median(values_ns: np.ndarray) -> str:
    return duration_text(float(np.median(values_ns)) / 1e9) if values_ns.size else "none"
