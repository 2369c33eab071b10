"""Sees each forward pass of the model, once, and asks `mxprobe.measuring.phase_rules` what it is.

    training     a gradient is recorded
    rollout      one token after a longer forward (a KV cache); sequences that grow by one token from call to call;
                 transformers' `generate` on the stack; sequences that grow and are trained on in the same step;
                 a declaration by the user: `mxprobe.rollout(model)`, or a function named with `--rollout-in`
    scored       the sequences of a training forward of the same step, without gradient: old or reference
                 log-probabilities
    evaluation   other sequences than any that were trained on in the step
    unknown      none of these could be told

A forward without gradient waits for what follows it, until the end of the step at most. Forwards are told apart by
hooks on the model and, below it, on the modules that hold most of its parameters (what DDP or PEFT wraps). A module
that is called outside of these continues the last forward of its thread, or begins another where that has it already.

Nothing is read from a device: where tokens are not on the CPU, growth is told by lengths and call sites alone, at least
three in a row, and scored sequences by their shape. Each thread has its own forwards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.declaration import declared_models
from mxprobe.events import Event, Tell
from mxprobe.measuring.adapters.weight_modules import not_to_be_hooked
from mxprobe.measuring.call_stack import Stack, StackReader
from mxprobe.measuring.compat import caller_frame, in_backward, is_compiled_in_place
from mxprobe.measuring.phase_rules import Evidence, Forward, Kind, Line, settle_waiting
from mxprobe.measuring.tokens.prefixes import Prefixes
from mxprobe.measuring.tokens.shapes import find_tokens, token_shape

EVENT = "phases"
_ELSEWHERE = -1
"""Root of modules that are called outside of every entry point."""


class _Thread(Line):
    """The forwards of one thread, and the one under way."""

    def __init__(self) -> None:
        super().__init__(threading.get_ident())
        self.stack: list[int] = []
        """Ids of the entry points that are being called, the outermost first."""
        self.open: Forward | None = None
        self.latest: Forward | None = None
        self.last: dict[int, tuple[Forward | None, Forward]] = {}
        """Number of a root -> its last two forwards."""
        self.root = _ELSEWHERE
        """The one that `latest` belongs to."""


def _tell_nobody(event: Event) -> None:
    pass


class Phases(Part):
    """A part that others ask, in any thread. It finishes first, so that they know what each call of theirs was."""

    name = "phases"
    roles = (TRAINER,)

    def __init__(
        self,
        clock: Clock,
        guard: Guard,
        tell: Tell = _tell_nobody,
        rollout_in: Iterable[str] = (),
    ) -> None:
        """`rollout_in`: functions, by `name` or `module.name`, that are on the stack while the run generates."""
        self.facts: dict[str, int] = {}
        """Forwards of the last probed step, by what they were and by what evidence: {"rollout by KV cache": 64}."""
        self._clock = clock
        self._guard = guard
        self._tell = tell
        self._reader = StackReader(rollout_in)
        self._not_found = set(self._reader.functions)
        self._roots: list[nn.Module] = []
        self._entries: dict[int, tuple[int, nn.Module]] = {}
        """id -> number of its root, and the module."""
        self._handles: list[Any] = []
        self._threads: dict[int, _Thread] = {}
        self._told: set[frozenset[str]] = set()
        self._related: dict[tuple[int, int], tuple[Any, bool]] = {}
        """(id of a declared model, number of a root) -> the model, and whether one holds the other; of this step."""
        self._step = clock.step
        self._armed = False

    def watch(self, roots: Sequence[nn.Module]) -> None:
        """Find where the model is entered."""
        barred = not_to_be_hooked(list(roots))
        self._roots = list(roots)
        for number, root in enumerate(roots):
            for module in entry_points(root):
                if not is_compiled_in_place(module) and (module is root or id(module) not in barred):
                    self._entries[id(module)] = number, module

    def remove(self) -> None:
        """Take the hooks out and let go of the model."""
        self._disarm()
        self._roots, self._entries, self._threads, self._related = [], {}, {}, {}

    def begin(self) -> None:
        self._disarm()
        self._threads = {}
        if not self._clock.is_watched:
            return
        enter = self._guard.hook(self.name, self._enter, when=lambda: self._armed)
        leave = self._guard.hook(self.name, self._leave, when=lambda: self._armed)
        for _, module in self._entries.values():
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        self._armed = True

    def _disarm(self) -> None:
        self._armed = False
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def finish(self) -> Iterable[Job]:
        """Settle what still waits, and tell what was recognised where that is news."""
        if not self._armed:
            return ()
        self._disarm()
        threads, self._threads, self._related = list(self._threads.values()), {}, {}
        trained = [forward for thread in threads for forward in thread.trained]
        counts: Counter[tuple[Kind, Evidence]] = Counter()
        for thread in threads:
            settle_waiting(thread.waiting, trained)
            counts.update(thread.counts)
        self.facts = {_words(*what): n for what, n in sorted(counts.items(), key=_rank)}
        if counts and frozenset(self.facts) not in self._told:
            self._told.add(frozenset(self.facts))
            told = {**self.facts, Kind.UNKNOWN.value: counts[Kind.UNKNOWN, Evidence.NONE]}
            self._tell(
                Event(EVENT, "forwards", "recognised", told, ", ".join(f"{name} {n}" for name, n in told.items()))
            )
            for function in sorted(self._not_found):
                words = f"--rollout-in {function}: no forward was called by a function of that name"
                self._tell(Event(EVENT, function, "not_called", {}, words))
        return ()

    def call(self, key: Hashable, x: torch.Tensor) -> Forward:
        """Return the forward that a call of a module belongs to; not to be asked in a backward pass.

        `key` stands for the module and the one who asks. Outside of the entry points a call belongs to the last forward
        of its thread, or is a new one where that has seen the key. `x`: what the module was given.
        """
        thread = self._thread()
        forward = thread.open or thread.latest
        if forward is None or (thread.open is None and self._is_new(forward, key)):
            forward = self._begin_forward(thread, _ELSEWHERE, x, caller_frame())
        forward.seen.add(key)
        if forward.length is None:
            self._learn(thread, forward, x)
        return forward

    def _is_new(self, last: Forward, key: Hashable) -> bool:
        return key in last.seen or last.with_gradient != torch.is_grad_enabled()

    def _thread(self) -> _Thread:
        if self._step != self._clock.step:
            self._step, self._threads = self._clock.step, {}
        ident = threading.get_ident()
        return self._threads.get(ident) or self._threads.setdefault(ident, _Thread())

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number, entry = self._entries.get(id(module), (_ELSEWHERE, None))
        if entry is not module or in_backward():  # a copy of the model has its hooks
            return
        thread = self._thread()
        if id(module) in thread.stack:  # an interruption has left it without a word
            thread.stack = []
        if not thread.stack:
            thread.open = self._begin_forward(thread, number, find_tokens(args, kwargs), caller_frame())
        thread.stack.append(id(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        thread = self._threads.get(threading.get_ident())
        if thread is not None and id(module) in thread.stack:
            del thread.stack[thread.stack.index(id(module)) :]
            if not thread.stack:
                thread.open = None

    def _begin_forward(self, thread: _Thread, number: int, tokens: Any, frame: Any) -> Forward:
        with_gradient = torch.is_grad_enabled()
        is_told = with_gradient and not self._reader.functions
        stack = Stack(0, False, "") if is_told else self._reader.read(frame)
        self._not_found.discard(stack.function)
        forward = Forward(thread, with_gradient=with_gradient, site=stack.site)
        if any(self._is_about(model, number) for model in declared_models()):
            forward.settle(Kind.ROLLOUT, Evidence.DECLARED)
        elif stack.function:
            forward.settle(Kind.ROLLOUT, Evidence.FUNCTION)
        elif with_gradient:
            forward.settle(Kind.TRAINING, Evidence.GRADIENT)
        elif stack.generates:
            forward.settle(Kind.ROLLOUT, Evidence.GENERATE)
        else:
            thread.waiting.append(forward)
        _, before = thread.last.get(number, (None, None))
        thread.last[number] = before, forward
        if thread.latest is not None:
            thread.latest.seen.clear()
        thread.latest, thread.root = forward, number
        self._learn(thread, forward, tokens)
        if forward.kind is Kind.TRAINING:
            thread.train(forward)
            thread.trained.append(forward)
        return forward

    def _learn(self, thread: _Thread, forward: Forward, tokens: Any) -> None:
        """Note how many tokens a forward was given, and hold it against the one before."""
        shape = token_shape(tokens)
        if shape is None:
            return
        forward.batch, forward.length = shape
        forward.prefixes = Prefixes.of(tokens)
        thread.make_room()
        before, last = thread.last[thread.root]
        if last is forward and forward.kind is not Kind.TRAINING:
            forward.continue_from(before)

    def _is_about(self, model: Any, number: int) -> bool:
        """Whether a declared model is the root that is entered, or holds it, or is a part of it."""
        key = id(model), number
        if key not in self._related:
            roots = self._roots if number == _ELSEWHERE else [self._roots[number]]
            modules = list(model.modules()) if isinstance(model, nn.Module) else []
            is_about = not (roots and modules) or any(
                any(each is root for each in modules) or any(each is model for each in root.modules()) for root in roots
            )
            self._related[key] = model, is_about
        return self._related[key][1]


def entry_points(root: nn.Module) -> list[nn.Module]:
    """Return the root and, each inside the last, the modules that hold more than half of its parameters."""
    sizes = {id(p): p.numel() for p in root.parameters()}
    found, at = [root], root
    while True:
        larger = [m for m in at.children() if 2 * _size(m, sizes) > sum(sizes.values())]
        if not larger or any(each is larger[0] for each in found):
            return [m for m in found if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
        at = larger[0]
        found.append(at)


def _size(module: nn.Module, sizes: dict[int, int]) -> int:
    return sum(sizes[key] for key in {id(p) for p in module.parameters()})


def _words(kind: Kind, why: Evidence) -> str:
    return kind.value if why in (Evidence.GRADIENT, Evidence.NONE) else f"{kind.value} {why.value}"


def _rank(counted: tuple[tuple[Kind, Evidence], int]) -> tuple[int, int]:
    (kind, why), _ = counted
    return list(Kind).index(kind), list(Evidence).index(why)
