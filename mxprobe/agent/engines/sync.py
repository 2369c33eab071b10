"""When an engine is given new weights, and what it holds right after: for a process that serves and does not train.

`load_weights` of the model's class is wrapped where it is defined: every way of vLLM's and SGLang's into a model ends
there, and a class is reached whatever `gc.freeze` hides. Where weights are written past it, the rows of a probed pass
show what is held all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.engines.fingerprints import Row, engine_rows, features_of, not_comparable_row
from mxprobe.agent.engines.layouts import HeldWeight, NotComparable, weights_of
from mxprobe.agent.guard import Guard, undisturbed
from mxprobe.agent.snapshot import event_now
from mxprobe.agent.taps.splices import Splices
from mxprobe.agent.taps.table import Tap

LOAD = "load_weights"
EVENT = "weight_sync"
PASS_BYTES = 1 << 26
"""Copied in one pass: weights that do not fit (of many experts) have their turn in the passes that follow."""

Taken = list[tuple[HeldWeight, torch.Tensor, "torch.Tensor | None"]]


class Held:
    """Copies of the hashed rows of every weight; hashed by the worker."""

    def __init__(self, taken: Taken, left_out: Sequence[NotComparable], device: torch.device) -> None:
        self.device = device
        self.ready = event_now(device)
        self._taken = taken
        self._left_out = left_out

    def rows(self, step: int) -> list[Row]:
        found = [row for each in self._taken for row in engine_rows(*each, step=step)]
        return found + [not_comparable_row(*each, step=step) for each in self._left_out]


class WeightSync:
    """`watch` at attach; `take` at the end of a pass: in the thread that serves."""

    def __init__(self, guard: Guard, tell: Callable[[str, str], None]) -> None:
        self.is_due = True
        """New weights have come, or it is the first pass."""
        self._guard = guard
        self._tell = tell
        self._n_loads = 0
        self._turn = 0
        """Weights read in this round."""
        self._is_new = False
        """Weights have come since the round began."""
        self._splices: Splices | None = None

    def watch(self, roots: Sequence[nn.Module]) -> None:
        owners = [next((c for c in type(root).__mro__ if LOAD in vars(c)), None) for root in roots]
        taps = [
            Tap(owner.__module__, owner.__qualname__, LOAD, (), _nothing, "engine")
            for owner in dict.fromkeys(owners)
            if owner is not None and getattr(sys.modules.get(owner.__module__), owner.__qualname__, None) is owner
        ]
        if not taps:
            self._tell(EVENT, f"the model has no {LOAD} to listen to: its weights are read at probed passes")
        self._splices = Splices(
            taps,
            self._on_load,
            on_wrapped=lambda tap: None,
            on_refused=lambda words: self._tell("tap", words),
            on_error=self._guard.swallow,
        )
        self._splices.ensure_wrapped()

    def _on_load(self, tap: Tap, arguments: dict[str, Any]) -> bool:
        self.is_due = self._is_new = True
        self._n_loads += 1
        return False

    def take(self, roots: Sequence[nn.Module]) -> Held | None:
        """Copies of what is held; None where there is nothing to compare."""
        self.is_due = False
        if self._is_new:
            self._is_new, self._turn = False, 0
        taken: Taken = []
        left_out: list[NotComparable] = []
        device = torch.device("cpu")
        n_seen, n_bytes, is_over = 0, 0, True
        for each in (each for root in roots for each in weights_of(root)):
            n_seen += 1
            if n_seen <= self._turn:
                continue
            if n_bytes >= PASS_BYTES:
                is_over = False
                break
            self._turn = n_seen
            if isinstance(each, NotComparable):
                left_out.append(each)
                continue
            n_out, n_in = each.shape
            device = each.device
            with undisturbed(device.type):
                columns = None if each.columns is None else each.columns(features_of(n_in, n_out, device))
                taken.append((each, each.rows(features_of(n_out, n_in, device)), columns))
            n_bytes += sum(x.numel() * x.element_size() for x in taken[-1][1:] if isinstance(x, torch.Tensor))
        if is_over:
            self._turn = 0
        else:
            self.is_due = True
        if self._n_loads:
            read = f"{len(taken)} weights read, {len(left_out)} not comparable"
            later = "" if is_over else "; the others in the passes that follow"
            self._tell(EVENT, f"{self._n_loads} calls of {LOAD}: {read}{later}")
            self._n_loads = 0
        return Held(taken, left_out, device) if taken or left_out else None

    def remove(self) -> None:
        if self._splices is not None:
            self._splices.give_back()


def _nothing(arguments: Any) -> list[Any]:
    return []
