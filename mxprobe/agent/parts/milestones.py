"""What happened to the run between its steps: checkpoints written and read, states loaded, learning rates moved.

    checkpoint_saved, checkpoint_loaded    by the Trainer, torch.save, torch.load, safetensors, distributed checkpoints
    resume                                 an optimizer state was loaded: the step count goes on from another number
    learning_rate                          more than a tenth away from the last one told

Files are collected over a step and told as one event a kind at its end. Nothing is read from a device: a learning rate
held in a tensor there is not looked at.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from torch import nn
from torch.optim import Optimizer

from mxprobe.agent.guard import Guard
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.agent.taps.scalars import scalar
from mxprobe.agent.taps.splicing import Splices
from mxprobe.agent.taps.tap_table import Tap
from mxprobe.events import Event, Tell
from mxprobe.measuring.compat import has_state_hooks

SAVED, LOADED, RESUME, LEARNING_RATE = "checkpoint_saved", "checkpoint_loaded", "resume", "learning_rate"
MOVED = 0.1
"""Relative change of a learning rate that is told: about 22 events while it falls to a tenth."""


def _file(argument: str) -> Callable[[Mapping[str, Any]], str]:
    def read(arguments: Mapping[str, Any]) -> str:
        value = arguments.get(argument)
        return str(value) if isinstance(value, (str, os.PathLike)) else f"a {type(value).__name__}"

    return read


def _trainer(arguments: Mapping[str, Any]) -> str:
    trainer = arguments["self"]
    return f"{type(trainer).__name__} at step {trainer.state.global_step}"


def _taps(kind: str, function: str) -> tuple[Tap, ...]:
    """Those of `save` or `load`, the outermost first."""
    verl = "verl.utils.checkpoint.fsdp_checkpoint_manager"
    distributed = "torch.distributed.checkpoint"
    return (
        Tap(verl, "FSDPCheckpointManager", f"{function}_checkpoint", ("local_path",), _file("local_path"), kind),
        Tap(
            f"{distributed}.state_dict_{'saver' if function == 'save' else 'loader'}",
            "",
            function,
            ("state_dict", "checkpoint_id"),
            _file("checkpoint_id"),
            kind,
            also=((distributed, function),),
        ),
        Tap("torch.serialization", "", function, ("f",), _file("f"), kind, also=(("torch", function),)),
    )


TAPS: tuple[Tap, ...] = (
    Tap("transformers.trainer", "Trainer", "_save_checkpoint", ("model",), _trainer, SAVED),
    Tap(
        "transformers.trainer",
        "Trainer",
        "_load_from_checkpoint",
        ("resume_from_checkpoint",),
        _file("resume_from_checkpoint"),
        LOADED,
    ),
    Tap("safetensors.torch", "", "save_file", ("tensors", "filename"), _file("filename"), SAVED),
    *_taps(SAVED, "save"),
    *_taps(LOADED, "load"),
)


class Milestones(Part):
    """Calls are noted in whatever thread makes them."""

    name = "milestones"
    roles = (TRAINER,)

    def __init__(
        self, guard: Guard, tell: Tell, optimizer: Callable[[], Optimizer | None], taps: tuple[Tap, ...] = TAPS
    ) -> None:
        """`optimizer`: returns the one that trains the model, while it is alive."""
        self._guard = guard
        self._tell = tell
        self._optimizer = optimizer
        self._splices = Splices(
            taps,
            self._listen,
            on_wrapped=lambda tap: None,
            on_refused=tell,
            on_error=guard.swallow,
        )
        self._handles: list[Any] = []
        self._noted: dict[str, list[str]] = {}
        self._lock = threading.RLock()
        self._rates: list[float] = []

    def watch(self, roots: Sequence[nn.Module]) -> None:
        self._splices.ensure_wrapped()
        on_weights = self._guard.hook("weights loaded", self._on_weights)
        for root in roots:
            self._handles.append(root.register_load_state_dict_post_hook(on_weights))
        optimizer = self._optimizer()
        if optimizer is not None and has_state_hooks(optimizer):
            on_state = self._guard.hook("optimizer state loaded", self._on_optimizer_state)
            self._handles.append(optimizer.register_load_state_dict_post_hook(on_state))

    def remove(self) -> None:
        """Give every function back, and tell what was noted since the last boundary."""
        handles, self._handles = self._handles, []
        for handle in handles:
            self._guard.attempt("removing hooks", handle.remove)
        self._splices.give_back()
        self._tell_noted()

    def finish(self) -> Iterable[Job]:
        self._splices.ensure_wrapped()
        self._tell_noted()
        optimizer = self._optimizer()
        if optimizer is not None:
            self._look_at_rates([group.get("lr") for group in optimizer.param_groups])
        return ()

    def _tell_noted(self) -> None:
        with self._lock:
            noted, self._noted = self._noted, {}
        for kind, details in noted.items():
            more = f" and {len(details) - 1} more" if len(details) > 1 else ""
            self._tell(Event(kind, details[0], "", {"n": len(details)}, details[0] + more))

    def _look_at_rates(self, values: list[Any]) -> None:
        rates = [number for value in values if (number := scalar(value)) is not None]
        known = len(rates) == len(self._rates)
        if known and all(abs(new - old) <= MOVED * max(abs(old), 1e-300) for new, old in zip(rates, self._rates)):
            return
        before, self._rates = self._rates, rates
        now = ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(rates))
        was = ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(before))
        words = f"{was} -> {now}" if before else now
        self._tell(Event(LEARNING_RATE, "", "moved" if before else "first", {"rates": rates, "before": before}, words))

    def _listen(self, tap: Tap, arguments: dict[str, Any]) -> bool:
        """Note a call; False, because metric sinks inside are to be heard. The outermost call names the event."""
        if not self._guard.is_forked:
            self._guard.attempt(tap.source, lambda: self._note(tap.framework, tap.read(arguments)))
        return False

    def _note(self, kind: str, detail: str) -> None:
        with self._lock:
            self._noted.setdefault(kind, []).append(detail)

    def _on_weights(self, module: nn.Module, keys: Any) -> None:
        missing, unexpected = len(keys.missing_keys), len(keys.unexpected_keys)
        self._note(LOADED, f"weights into {type(module).__name__}: {missing} missing, {unexpected} unexpected keys")

    def _on_optimizer_state(self, optimizer: Optimizer) -> None:
        self._note(RESUME, f"a state was loaded into {type(optimizer).__name__}")
