"""How the experts of a layer differ: quantiles over them, and the worst of them by name.

The worst are ranked by the error that the operand makes in the expert's product, ||E_e B_e||^2 / ||A_e B_e||^2, and by
the share of elements that it zeroes: an outlier hides in the first (it carries the energy) and shows in the second.
Quantiles are of ratios, which cannot be added: they describe the experts of one probed step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mxprobe.measuring.operands.stack import Experts
from mxprobe.schema import Row
from mxprobe.tables import EXPERT_SUMS, SPREAD_QUANTILES

OUTPUT_ERROR, ERROR, ZEROED, ROWS = "output_error", "error", "zeroed", "rows"
EVERY = -1
"""In place of a number of worst experts: all of them."""


def expert_rows(
    key: Row, held: Experts, per_expert: Mapping[str, list[float]], *, worst: int
) -> Iterator[tuple[str, Row]]:
    """Rows of tables `experts` and `expert_spread` for one operand; `key`: when, where, role, format and rule."""
    measures = {
        OUTPUT_ERROR: _ratios(per_expert["out_e2"], per_expert["out_ref2"]),
        ERROR: _ratios(per_expert["sum_e2"], per_expert["sum_x2"]),
        ZEROED: _ratios(per_expert["n_zeroed"], per_expert["n"]),
        ROWS: [float(n) for n in held.rows],
    }
    shared = {"n_steps": 1, "n_experts": held.n_experts, "n_called": held.n_called}
    for name, values in measures.items():
        if name != ROWS or key["role"] == "x_fwd":
            spread = {"n_measured": len(values), "n_one_token": held.n_one_token, **_quantiles(values)}
            yield "expert_spread", {**key, **shared, "measure": name, **spread}
    by_error, by_zeroed = _ranks(measures[OUTPUT_ERROR]), _ranks(measures[ZEROED])
    for i, expert in enumerate(held.numbers):
        if worst == EVERY or min(by_error[i], by_zeroed[i]) < worst:
            sums = {
                name: int(per_expert[name][i]) if name.startswith("n") else per_expert[name][i] for name in EXPERT_SUMS
            }
            ranks = {"rank_output_error": by_error[i], "rank_zeroed": by_zeroed[i]}
            yield "experts", {**key, **shared, "expert": expert, "rows": held.rows[i], **ranks, **sums}


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b if b > 0 else 0.0 for a, b in zip(above, below)]


def _ranks(values: Sequence[float]) -> list[int]:
    """0 for the largest; of equal ones the first."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    ranks = [0] * len(values)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks


def _quantiles(values: Sequence[float]) -> Row:
    """Linear between the order statistics, as numpy's."""
    ordered = sorted(values)
    found: Row = {}
    for percent in SPREAD_QUANTILES:
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found[f"q{percent}"] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return found
