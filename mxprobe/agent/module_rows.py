"""Which modules hold weights that a GEMM reads, which of them are probed, and why the others are not.

Rows of table `modules`. FLOPs are forward and per training step, 2 * rows * parameters; modules that no hook
sees are estimated from the median rows of those that are seen, and the reason says so.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.measuring.adapters.weight_modules import Entry

PROBED, NOT_SELECTED, NOT_CALLED, NOT_LINEAR = "probed", "not_selected", "not_called", "not_linear"


NO_GRADIENT = (
    "no gradient came to its output in some probed steps: it was changed in place as a view of a larger tensor, or the "
    "loss does not depend on it"
)

NOT_REPLAYED = "has no sensitivity and no place in replays, which compute nn.Linear alone"


def module_rows(entries: list[Entry], probes: dict[str, ModuleProbe]) -> list[dict[str, Any]]:
    """Return rows of table `modules`, with the calls counted so far."""
    counted = [p.train_rows or p.rollout_rows for p in probes.values()]
    seen = [n for n in counted if n]
    typical = median(seen) if seen else 1
    now = time.time_ns()
    rows: list[dict[str, Any]] = []
    for entry in entries:
        probe = probes.get(entry.name)
        status, reason = _status(entry, probe)
        n_train = probe.train_rows if probe is not None else 0
        n_rollout = probe.rollout_rows if probe is not None else 0
        flops = _flops_per_row(entry)
        if status == PROBED:
            flops *= n_train or n_rollout or (0 if seen else typical)
        elif flops:
            flops *= typical
            reason += _ESTIMATED if seen else _ONE_ROW
        rows.append(
            {
                "time_ns": now,
                "module": entry.name,
                "class_name": type_before_parametrizations(entry.module).__name__,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "n_parameters": entry.n_parameters,
                "status": status,
                "reason": reason,
                "train_rows": n_train,
                "rollout_rows": n_rollout,
                "gemm_flops": float(flops),
            }
        )
    return rows


_ESTIMATED = "; its FLOPs are estimated from the median rows of the probed modules"
_ONE_ROW = "; its FLOPs are those of one row, as no call of a probed module has been counted"


def _flops_per_row(entry: Entry) -> float:
    """Count no FLOPs for a lookup, and those of one expert for a stack: the least a token can be routed to."""
    if isinstance(entry.module, (nn.Embedding, nn.EmbeddingBag)):
        return 0.0
    if len(entry.shape) > 2 and not entry.has_adapter and not isinstance(entry.module, _CONVOLUTIONS):
        return 2.0 * entry.n_parameters / entry.shape[0]
    return 2.0 * entry.n_parameters


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _status(entry: Entry, probe: ModuleProbe | None) -> tuple[str, str]:
    if not entry.has_adapter:
        return NOT_LINEAR, _why_not_linear(entry)
    if probe is None and entry.obstacle:
        return NOT_CALLED, entry.obstacle
    if probe is None:
        return NOT_SELECTED, "its name matches none of the layer patterns"
    if probe.last_probed < 0 or probe.train_rows:
        not_replayed = NOT_REPLAYED * (not isinstance(entry.module, nn.Linear))
        told = (probe.withheld, NO_GRADIENT * (probe.n_lost_gradients > 0), not_replayed)
        return PROBED, "; ".join(each for each in told if each)
    if entry.obstacle:
        return NOT_CALLED, entry.obstacle + "; its weights alone are measured" * probe.weights_alone
    if probe.why_unread:
        return NOT_CALLED, f"called, but not readable: {probe.why_unread}"
    if not probe.trains and probe.rollout_rows:
        return PROBED, ""
    if probe.rollout_rows:
        return NOT_CALLED, "called in generation, never in training: the loss reads its weight directly"
    return NOT_CALLED, "never called: its weight is read directly (fused head), or this part of the model is unused"


def _why_not_linear(entry: Entry) -> str:
    if isinstance(entry.module, (nn.Embedding, nn.EmbeddingBag)):
        return "a lookup: no GEMM"
    if len(entry.shape) > 2:
        return f"{entry.shape[0]} matrices held as one parameter of {len(entry.shape)} dimensions"
    return f"{type(entry.module).__name__} holds a matrix and is no nn.Linear"
