"""What quantizing a router's operands does to the choice of experts, on the tokens of one probed step.

    z = x W^T + b                    logits, exact                    margin = z_(k) - z_(k+1), sorted
    z' = Q(x) Q(W)^T + b             under the format and rule measured (and, as ran, the router's own logits)
    predicted flip of a token        the k largest of z' are other experts than those of z
    chance of one, by size alone     Phi(-margin / (sqrt(2) sigma)), sigma^2 = the token's mean square of z' - z, its
                                     mean over experts taken off: a shift of all logits moves no expert
    observed flip                    the experts chosen are not the k largest of z: what the run's own arithmetic did

All on the same x: what a changed x does further down is in `flips`, where generation and training are compared. Chosen
by other than the k largest logits (a bias, groups of experts), no flip can be told from logits, and none is counted.
"""

from __future__ import annotations

import math

import torch

from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.recipes import quantize
from mxprobe.schema import Row

_SUMS = ("sum_margin", "sum_margin2", "sum_logit2", "sum_error2", "sum_ran_error2", "sum_chance")
_COUNTS = ("n_predicted", "n_slots_predicted", "n_observed", "n_slots_observed")
_BY_LOGITS = 0.99
"""Share of tokens whose experts must be the k largest logits: a tie may be broken either way."""


@torch.no_grad()
def routing_row(snapshot: Snapshot, *, format: str, rule: str) -> Row | None:
    """Values of a row of table `routing`; None where the router does not say whom it chose."""
    weight = snapshot.weight
    if snapshot.chosen is None or snapshot.y is None or weight.out_index is not None:
        return None
    chosen, y = snapshot.tiled(snapshot.chosen), snapshot.tiled(snapshot.y)
    x, w = snapshot.tiled(snapshot.x), weight.rows
    if not len(chosen) or len(chosen) != len(x):
        return None
    n_experts, k = w.shape[0], chosen.shape[1]
    if k >= n_experts:
        return None
    bias = 0.0 if weight.bias is None else weight.bias.double()
    name = f"{format}+{rule}" if format == "mxfp4" else format
    z = (x.double() @ w.double().T + bias).nan_to_num(0.0, 0.0, 0.0)
    quantized = quantize(x, name).double() @ quantize(w, name).double().T + bias
    error = (quantized - z).nan_to_num(0.0, 0.0, 0.0)
    error = error - error.mean(1, keepdim=True)
    ordered = z.sort(1, descending=True).values
    margin = ordered[:, k - 1] - ordered[:, k]
    exact, ran = chosen_experts(z.topk(k).indices, n_experts), chosen_experts(chosen, n_experts)
    predicted = chosen_experts((z + error).topk(k).indices, n_experts)
    is_top = chosen_experts(y.double().topk(k).indices, n_experts).eq(ran).all(1)
    by_logits = bool(is_top.float().mean() > _BY_LOGITS)
    sigma = error.square().mean(1).sqrt()
    chance = torch.special.ndtr(-margin / (math.sqrt(2.0) * sigma).clamp(min=torch.finfo(torch.float64).tiny))
    centred = z - z.mean(1, keepdim=True)
    ran_error = y.double() - z
    ran_error = ran_error - ran_error.mean(1, keepdim=True)
    values = torch.stack(
        (
            margin.sum(),
            margin.square().sum(),
            centred.square().sum(),
            error.square().sum(),
            ran_error.square().sum(),
            chance.sum(),
            (predicted != exact).any(1).sum().double(),
            (predicted & ~exact).sum().double(),
            (ran != exact).any(1).sum().double(),
            (ran & ~exact).sum().double(),
        )
    ).tolist()
    return {
        "sampled_frac": snapshot.tile_frac,
        "n_tokens": len(chosen),
        "top_k": k,
        "by_logits": by_logits,
        **dict(zip(_SUMS, values)),
        **{name: int(n) if by_logits else None for name, n in zip(_COUNTS, values[6:])},
    }


def chosen_experts(chosen: torch.Tensor, n_experts: int) -> torch.Tensor:
    """int64 [T, k] -> bool [T, E]: whether the token was sent there."""
    return torch.zeros(len(chosen), n_experts, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)
