"""From the first look at the process to the last hook taken out.

    OBSERVING   global hooks wait for an optimizer step (or, failing that, for generation)
    SERVING     no step came, but forward passes without gradient: hooks go in at the next one
    ATTACHED    the hooks of the parts are in; each step ends at a boundary
    GONE        every hook is out, nothing of ours runs in the user's threads any more

What is measured is the business of the parts (`mxprobe.agent.part`). Hooks go in and out in the training thread at a
step boundary; from our own thread only where the controller is lost, or no boundary comes after `detach` was asked.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.accounts import Accounts
from mxprobe.agent.budget import Budget
from mxprobe.agent.clock import completed_steps
from mxprobe.agent.context import Context
from mxprobe.agent.guarded_parts import PartList
from mxprobe.agent.part import METRICS
from mxprobe.agent.parts import all_parts
from mxprobe.agent.roots import RootWatch, holds_a_gemm, outermost, trained_roots
from mxprobe.agent.run import State
from mxprobe.agent.stepping import watch_steps
from mxprobe.agent.transport import Transport
from mxprobe.events import Event
from mxprobe.protocol import AgentConfig


class Session:
    """The hooks of one attach. Everything public may be called from any thread."""

    def __init__(self, config: AgentConfig, transport: Transport) -> None:
        self.state = State.OBSERVING
        self.detach_asked = ""
        """The reason for which the hooks are to come out at the next boundary."""
        self.gone = threading.Event()
        self._context = context = Context.make(config, transport, lambda: self.abandon("error_budget"))
        self.guard, self.worker, self.run = context.guard, context.worker, context.run
        budget = Budget(config.max_overhead, config.every)
        self._accounts = Accounts(context, budget)
        self._parts = PartList(all_parts(context, budget), context.guard)
        self._rows_are_due = True
        """The parts' rows are to be told once more, after the first probed step."""
        self._looked_twice = False
        self._is_out = False
        self._lock = threading.RLock()
        self._root_handles: list[Any] = []
        self.worker.start()
        undo: list[Callable[[], None]] = [lambda: self.worker.stop(0.0), *(part.remove for part in self._parts)]
        try:
            self._watch = RootWatch(self.guard.swallow)
            undo.append(self._watch.close)
            for part in self._parts:
                part.observe()
            self._unwatch_steps = watch_steps(self.guard.hook("optimizer step", self._on_optimizer_step))
        except BaseException:
            for each in reversed(undo):
                each()
            raise

    @property
    def reason(self) -> str:
        """Why the session ended, once it has."""
        return self.run.why_left

    # Called by the agent's thread.

    def settle_without_step(self) -> dict[str, str] | None:
        """No optimizer step came in time. Wait for a forward pass to serve, or return {reason, detail}."""
        with self._lock:
            if self.state is not State.OBSERVING or self.run.runs_no_model:
                return None
            seen, watch, found = self._watch.describe(), self._watch, list(self._watch.without_grad.values())
            if not watch.with_grad and not watch.without_grad and self._parts.can_listen():
                self.run.role = METRICS
                self._parts.each(lambda part: part.listen())
                self.worker.put(self._announce)
                return None
            if watch.with_grad or not watch.without_grad:
                self.abandon("no_step")
                return {"reason": "no_step", "detail": seen}
            # Looking may fail: the job may be changing its modules under our thread.
            where = "looking at a model that serves"
            models = [m for m in found if self.guard.attempt(where, lambda m=m: holds_a_gemm(m))]
            if not models:
                self.abandon("no_model")
                return {"reason": "no_model", "detail": f"{seen}, none of which holds a Linear"}
            self.state = State.SERVING
            roots = {id(m) for m in outermost(models)}
            on_enter = self.guard.hook("first serving pass", self._on_serving_enter, when=lambda: not self._is_out)
            watch.on_enter = lambda module: on_enter(module) if id(module) in roots else None
        return None

    def tick(self) -> None:
        """A moment of the agent's thread."""
        if self.run.runs_no_model and self.state is State.OBSERVING:
            self._parts.each(lambda part: part.listen())
        elif self.state is State.ATTACHED and self.run.is_gone:
            self.abandon("model_gone")

    def ask_detach(self, reason: str) -> None:
        """Take the hooks out at the next boundary; at once where none are in yet."""
        with self._lock:
            self.detach_asked = self.detach_asked or reason
            if self.state in (State.OBSERVING, State.SERVING):
                self.abandon(reason)

    def ask(self, frame: dict[str, Any]) -> None:
        """Hand on a command of the user's."""
        self._parts.each(lambda part: part.ask(frame))

    def close(self) -> None:
        """Take out the optimizer hook, inert by now; after `gone`, by the agent's thread."""
        if not self._is_out:  # a signal of the user's came in between
            self._take_out()
        self._unwatch_steps()
        self._parts.each(lambda part: part.close())

    def status(self) -> dict[str, Any]:
        """Where the session stands, as sent in `status` and `detached` frames."""
        state = {"state": self.state.value, "role": self.run.role}
        return {**state, **self._accounts.status(), **self._parts.status()}

    # Called in the training thread, by hooks.

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.state in (State.OBSERVING, State.SERVING):
            self._observe(optimizer)
        elif self.state is State.ATTACHED and self.run.is_trainer:
            ends = self.run.ends_step(optimizer)
            if ends is None:
                self.abandon("model_gone")
            elif ends:
                self._end_step()

    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        roots, complete = trained_roots(list(self._watch.with_grad.values()), optimizer)
        if not roots:
            return
        in_doubt = not complete or len(roots) > 1 or self._watch.began_inside
        if in_doubt and not self._looked_twice:
            self._looked_twice = True  # a module without a hook, entered before the watch, leaves without a word
            self._watch.forget()
            return
        with self._lock:
            if self.state is not State.GONE:
                self.run.train(roots, optimizer)
                base = completed_steps(optimizer)
                if base is not None:
                    self.worker.put(lambda: self._set_base(base))
                self._install(roots)

    def _set_base(self, count: torch.Tensor) -> None:
        self._context.recorder.step_base = int(count.item())
        self._context.schedule.align(self._context.recorder.step_base)

    def _on_serving_enter(self, root: nn.Module) -> None:
        """A root that serves begins a forward pass, in the thread that runs it."""
        with self._lock:
            if self.state is State.SERVING:
                self.run.serve(root)
                self._install([root])
                on_leave = self.guard.hook("serving pass", self._on_root_leave)
                self._root_handles.append(root.register_forward_hook(on_leave, always_call=True))

    def _on_root_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.state is State.ATTACHED:
            self._end_step()

    def _install(self, roots: list[nn.Module]) -> None:
        self._watch.close()
        self._watch.forget()  # it held the roots
        self._parts.keep_for(self.run.role)
        self._parts.each(lambda part: part.watch(roots))
        self._context.clock.advance()
        self.state = State.ATTACHED  # from here on `tick` looks whether the roots are still there
        self.worker.put(self._announce)
        self._begin_step()

    def _begin_step(self) -> None:
        self._accounts.begin(is_busy=self._parts.is_busy)
        with self._lock:
            # Another thread may just have taken everything out, or a part that fails uses up the error budget.
            self._parts.each(lambda part: None if self.state is State.GONE else part.begin())

    def _end_step(self) -> None:
        context, clock = self._context, self._context.clock
        clock.advance()
        clock.is_last = bool(self.detach_asked)
        for job in self._parts.finish():
            context.hand_over(job)
        context.hand_over(self._accounts.finish())
        if clock.probed and self._rows_are_due:
            self._rows_are_due = False
            self.worker.put(self._tell_rows)
        clock.next()
        self._parts.each(lambda part: part.boundary())
        if self.detach_asked:
            self.abandon(self.detach_asked)
        else:
            self._begin_step()

    # In the worker.

    def _announce(self) -> None:
        """Once the step count is known, and kernels are compiled."""
        context, run, parts = self._context, self.run, self._parts.status()
        facts = {"roots": ", ".join(run.root_names), "n_modules": parts.get("modules", 0)}
        context.events.write(Event("attached", run.role, "model" if run.root_names else "signals", facts), 0)
        self._tell_rows()
        attached = {"verb": "attached", "roots": run.root_names, "role": run.role, "step": context.recorder.step_base}
        context.transport.control({**attached, **parts})

    def _tell_rows(self) -> None:
        for table, row in self._parts.rows():
            self._context.recorder.add(table, row)
        self._context.recorder.flush()

    def _farewell(self) -> None:
        self._context.events.write(Event("detached", "", self.run.why_left), self.run.n_steps)
        self._tell_rows()

    # In any thread.

    def abandon(self, reason: str) -> None:
        """Take every hook out now, whatever the training thread is doing, and undo every patch; once."""
        with self._lock:
            if self.state is State.GONE:
                return
            was_attached = self.state is State.ATTACHED or self.run.runs_no_model
            self.state = State.GONE
            self.run.why_left = reason
        try:
            self._take_out()
            if was_attached:
                self.worker.put(self._farewell)
        finally:
            self.gone.set()

    def _take_out(self) -> None:
        parts = [part.remove for part in self._parts]
        for remove in (self._watch.close, *parts, *(handle.remove for handle in self._root_handles)):
            self.guard.attempt("removing hooks", remove)
        self._is_out = True
