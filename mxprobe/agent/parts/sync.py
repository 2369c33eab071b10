"""When an engine is given new weights, and what it holds right after: for a process that serves and does not train.

Wrapped at the classes that define them, which are reached whatever `gc.freeze` hides: `load_weights` of the model,
where every way of vLLM's and SGLang's into it ends; `process_weights_after_loading` of what its layers hold as
`quant_method`, `scheme` or `kernel`, which packs and permutes what was loaded; and the workers' methods in `UPDATES`.
Where weights are written past all of them, the rows of a probed pass show what is held all the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.part import ROLLOUT, Job, Part
from mxprobe.agent.taps.splicing import Splices
from mxprobe.agent.taps.tap_table import Tap
from mxprobe.events import WEIGHT_SYNC, Event
from mxprobe.measuring.engines.fingerprints import engine_rows, hashed_of, not_comparable_row
from mxprobe.measuring.engines.layouts import HeldWeight, NotComparable, weights_of
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.schema import WEIGHT_CODES, TableRow

LOAD = "load_weights"
PROCESS = "process_weights_after_loading"
_WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
_UPDATER = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
UPDATES: tuple[tuple[tuple[str, str], str, tuple[str, ...]], ...] = (
    (_WORKER, "reload_weights", ()),
    (_WORKER, "update_weights", ("update_info",)),
    (_WORKER, "finish_weight_update", ()),
    (_UPDATER, "update_weights_from_disk", ("model_path",)),
    (_UPDATER, "load_weights_from_distributed", ()),
    (_UPDATER, "update_weights_from_tensor", ("named_tensors",)),
    (_UPDATER, "update_weights_from_ipc", ("recv_req",)),
)
"""(module, class), method, parameters it must have: vLLM 0.33.0, SGLang 0.5.23."""
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

    def rows(self, step: int) -> list[TableRow]:
        found = [row for each in self._taken for row in engine_rows(*each, step=step)]
        found += [not_comparable_row(*each, step=step) for each in self._left_out]
        return [(WEIGHT_CODES, row) for row in found]


class WeightSync(Part):
    """`take` reads what is held, at the end of a pass, in the thread that serves."""

    name = "weights of the engine"
    roles = (ROLLOUT,)

    def __init__(self, context: Context) -> None:
        self.is_due = True
        """New weights have come, or it is the first pass."""
        self._context = context
        self._tell = context.events.tell
        self._calls: Counter[str] = Counter()
        self._turn = 0
        """Weights read in this round."""
        self._is_new = False
        """Weights have come since the round began."""
        self._splices: Splices | None = None

    def watch(self, roots: Sequence[nn.Module]) -> None:
        loads = list(_owners(roots, LOAD))
        if not loads:
            words = f"the model has no {LOAD} to listen to: its weights are read at probed passes"
            self._tell(Event(WEIGHT_SYNC, "", "no_loader", text=words))
        processes = _owners([each for root in roots for each in _processors(root)], PROCESS)
        taps = [Tap(c.__module__, c.__qualname__, LOAD, (), _nothing, "engine") for c in loads]
        taps += [Tap(c.__module__, c.__qualname__, PROCESS, ("layer",), _nothing, "engine") for c in processes]
        taps += [Tap(*place, method, parameters, _nothing, "engine") for place, method, parameters in UPDATES]
        self._splices = Splices(
            taps,
            self._on_load,
            on_wrapped=lambda tap: None,
            on_refused=self._tell,
            on_error=self._context.guard.swallow,
        )
        self._splices.ensure_wrapped()

    def _on_load(self, tap: Tap, arguments: dict[str, Any]) -> bool:
        """Note that weights have come; False, because the functions inside are to be heard."""
        self._context.guard.attempt(tap.source, lambda: self._note(tap.function))
        return False

    def _note(self, function: str) -> None:
        self.is_due = self._is_new = True
        self._calls[function] += 1

    def finish(self) -> Iterable[Job]:
        if not self.is_due and not self._context.clock.probed:
            return ()
        held = self.take(self._context.run.roots(), self._context.memory.reserve)
        if held is None:
            return ()
        step = self._context.clock.step
        return [Job(lambda: held.rows(step), held.device, [held.ready], held)]

    def take(self, roots: Sequence[nn.Module], max_bytes: int = PASS_BYTES) -> Held | None:
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
            if n_bytes >= min(PASS_BYTES, max_bytes):
                is_over = False
                break
            self._turn = n_seen
            if isinstance(each, NotComparable):
                left_out.append(each)
                continue
            device = each.device
            with undisturbed(device.type):
                taken.append((each, *hashed_of(each)))
            n_bytes += sum(x.numel() * x.element_size() for x in taken[-1][1:] if isinstance(x, torch.Tensor))
        if is_over:
            self._turn = 0
        else:
            self.is_due = True
        if self._calls:
            read = f"{len(taken)} weights read, {len(left_out)} not comparable"
            later = "" if is_over else "; the others in the passes that follow"
            calls = ", ".join(f"{n} calls of {function}" for function, n in self._calls.items())
            counts = {"calls": dict(self._calls), "n_read": len(taken), "n_not_comparable": len(left_out)}
            self._tell(Event(WEIGHT_SYNC, "", "loaded", counts, f"{calls}: {read}{later}"))
            self._calls.clear()
        return Held(taken, left_out, device) if taken or left_out else None

    def remove(self) -> None:
        if self._splices is not None:
            self._splices.give_back()


def _processors(root: nn.Module) -> Iterator[Any]:
    """What packs the weights of a layer after they were loaded: of vLLM's and SGLang's layers, not modules."""
    for module in root.modules():
        for name in ("quant_method", "scheme"):
            found = vars(module).get(name)
            yield from (each for each in (found, getattr(found, "kernel", None)) if each is not None)


def _owners(things: Sequence[Any], function: str) -> Iterator[type]:
    """The classes that define a method of these, each once; those that their module knows by their name."""
    defining = (next((c for c in type(each).__mro__ if function in vars(c)), None) for each in things)
    for owner in dict.fromkeys(defining):
        if owner is not None and getattr(sys.modules.get(owner.__module__), owner.__qualname__, None) is owner:
            yield owner


def _nothing(arguments: Any) -> list[Any]:
    return []
