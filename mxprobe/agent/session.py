"""From the first look at the process to the last hook taken out.

    OBSERVING   global hooks wait for an optimizer step (or, failing that, for generation)
    SERVING     no step came, but forward passes without gradient: hooks go in at the next one
    ATTACHED    per-module hooks are in; each step ends at a boundary
    GONE        every hook is out, nothing of ours runs in the user's threads any more

Hooks go in and out in the training thread at an optimizer-step boundary. The exceptions, from our own thread and
under the dead flag of each probe: the controller is lost, or no boundary comes after `detach` was asked.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent import memory
from mxprobe.agent.budget import Budget
from mxprobe.agent.clock import Clock, completed_steps
from mxprobe.agent.guard import Guard
from mxprobe.agent.inventory import NO_GRADIENT, module_rows
from mxprobe.agent.ledger import Ledger
from mxprobe.agent.memory import DeviceMemory
from mxprobe.agent.parts import device_steps
from mxprobe.agent.parts.device_steps import DeviceSteps
from mxprobe.agent.parts.eager import EagerSteps
from mxprobe.agent.parts.expert_versions import copy_expert_versions
from mxprobe.agent.parts.flight import FlightTap
from mxprobe.agent.parts.milestones import Milestones
from mxprobe.agent.parts.norms import NormWatch
from mxprobe.agent.parts.planted import PlantedOps
from mxprobe.agent.parts.replays import Replays
from mxprobe.agent.parts.signals import SignalTaps, any_sink
from mxprobe.agent.parts.switch import RecipeSwitch, Request
from mxprobe.agent.parts.sync import WeightSync
from mxprobe.agent.parts.tokens import TokenTaps
from mxprobe.agent.parts.warm_up import WarmUp
from mxprobe.agent.probes.experts_probe import ExpertsProbe
from mxprobe.agent.probes.module_probe import ModuleProbe, any_rollout
from mxprobe.agent.probes.router_probe import probe_of
from mxprobe.agent.roots import RootWatch, outermost, trained_roots
from mxprobe.agent.schedule import Schedule
from mxprobe.agent.stepping import watch_steps
from mxprobe.agent.transport import Transport
from mxprobe.agent.worker import Worker
from mxprobe.events import Event
from mxprobe.measuring.adapters.expert_numbers import first_experts
from mxprobe.measuring.adapters.inventory import COMPILED, Entry, is_compiled, not_to_be_hooked, take_inventory
from mxprobe.measuring.adapters.inventory import misfits as find_misfits
from mxprobe.measuring.adapters.master import is_stepped_by
from mxprobe.measuring.adapters.structure import is_router
from mxprobe.measuring.adapters.table import adapter_of
from mxprobe.measuring.adapters.token_groups import token_group
from mxprobe.measuring.engines.layouts import HeldWeight, weights_of
from mxprobe.measuring.isolation import in_backward
from mxprobe.measuring.operands.bare_weights import copy_weights
from mxprobe.measuring.versions.weight_history import RECENT, copy_versions
from mxprobe.protocol import AgentConfig

METRICS = "metrics"
"""Role of a process that is listened to for its signals alone."""
FOREIGN_STEPS = 4
"""Steps of another optimizer of the model, without one of ours, after which that one marks the boundaries. Of one of
another model, after the death of ours: the model is gone."""


class State(Enum):
    OBSERVING = "observing"
    SERVING = "serving"
    ATTACHED = "attached"
    GONE = "gone"


class Session:
    """The hooks of one attach. Everything public may be called from any thread."""

    def __init__(self, config: AgentConfig, transport: Transport) -> None:
        self.state = State.OBSERVING
        self.role = "trainer"
        self.reason = ""
        """Why the session ended, once it has."""
        self.detach_asked = ""
        """The reason for which the hooks are to come out at the next boundary."""
        self.gone = threading.Event()
        self.n_steps = 0
        self.n_probed = 0
        self.total_step_ns = self.total_hook_ns = 0
        self._config = config
        self._transport = transport
        self._clock = Clock()
        self._schedule = Schedule(config.every, config.weights_every)
        self._probes: dict[str, ModuleProbe] = {}
        self._entries: list[Entry] = []
        self._ledger = Ledger(config, transport, self._clock, self._schedule, self._module_rows)
        tell = self._ledger.on_event
        self.guard = Guard(config.error_budget, self._ledger.on_error, lambda: self.abandon("error_budget"))
        self._budget = Budget(config.max_overhead, config.every)
        self._measuring = False
        """Our thread was at work when this step began."""
        self._signals = SignalTaps(self._on_signals, self.guard.swallow, tell)
        self._milestones = Milestones(self.guard, tell)
        self._memory = DeviceMemory(config.max_gpu_memory, tell)
        self._device_steps = DeviceSteps.of("cpu")
        self._warm_up = WarmUp(tell)
        self._replays = Replays(config, self._clock, self.guard, tell, self._memory, lambda: self.worker.backlog > 0)
        self._tokens = TokenTaps(self._clock, self.guard, tell)
        self._norms = NormWatch(self.guard)
        self._sync = WeightSync(self.guard, tell)
        self._flight = FlightTap(self._clock, self.guard, self._ledger.on_norms) if config.record else None
        self._eager = EagerSteps(config.eager_probe_steps, self.guard, tell)
        self._planted = PlantedOps(self._clock, self.guard, tell)
        self._switch = RecipeSwitch(self._ledger.on_switch_answer, tell)
        self._roots: list[weakref.ref[nn.Module]] = []
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._optimizer: weakref.ref[Any] | None = None
        self._foreign: dict[int, int] = {}
        self._compiled: set[str] = set()
        self._looked_twice = False
        self._is_out = False
        self._ledger.guard = self.guard
        self.worker = Worker(config, self._ledger.recorder, self.guard)  # a thread: nothing before it may fail any more
        self._ledger.worker = self.worker
        undo: list[Callable[[], None]] = [lambda: self.worker.stop(0.0), self._eager.leave]
        try:
            self._watch = RootWatch(self.guard.swallow)
            undo.append(self._watch.close)
            self._eager.watch()
            self._unwatch_steps = watch_steps(self._on_optimizer_step)
        except BaseException:
            for each in reversed(undo):
                each()
            raise

    # Called by the agent's thread.

    def settle_without_step(self) -> dict[str, str] | None:
        """No optimizer step came in time. Wait for a forward pass to serve, or return {reason, detail}."""
        with self._lock:
            if self.state is not State.OBSERVING:
                return None
            if self.role == METRICS:
                return None
            seen = self._watch.describe()
            if not self._watch.with_grad and not self._watch.without_grad and any_sink():
                self._listen()
                return None
            if self._watch.with_grad or not self._watch.without_grad:
                self._remove("no_step")
                return {"reason": "no_step", "detail": seen}
            models = [m for m in self._watch.without_grad.values() if self._can_serve(m)]
            if not models:
                self._remove("no_model")
                return {"reason": "no_model", "detail": f"{seen}, none of which holds a Linear"}
            self.state = State.SERVING
            roots = {id(m) for m in outermost(models)}
            self._watch.on_enter = lambda module: self._on_serving_enter(module, roots)
        return None

    def _can_serve(self, model: nn.Module) -> bool:
        """False also where looking failed: the job may be changing its modules under our thread."""
        try:
            return _has_linear(model)
        except Exception as error:
            self.guard.swallow("looking at a model that serves", error)
            return False

    def tick(self) -> None:
        """A moment of the agent's thread."""
        if self.role == METRICS and self.state is State.OBSERVING:
            self._signals.ensure_wrapped()
        elif self.state is State.ATTACHED and self._is_model_gone():
            self.abandon("model_gone")

    def _is_model_gone(self) -> bool:
        """The process has dropped model and optimizer, to build others; what we hold of them keeps memory from it."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        return optimizer is None and not self._live_roots()

    def _live_roots(self) -> list[nn.Module]:
        return [root for reference in self._roots if (root := reference()) is not None]

    def _listen(self) -> None:
        """A process that logs and runs no model: its signals alone, until it takes a step after all."""
        self.role = METRICS
        self._eager.leave()
        self._signals.ensure_wrapped()
        self.worker.put(lambda: self._announce([], []))

    def ask_detach(self, reason: str) -> None:
        """Take the hooks out at the next boundary; at once where none are in yet."""
        with self._lock:
            self.detach_asked = self.detach_asked or reason
            if self.state in (State.OBSERVING, State.SERVING):
                self._remove(reason)

    def trigger(self, reason: str) -> None:
        """Keep what the flight recorder holds, and go to full statistics."""
        self.worker.put(lambda: self._ledger.trigger(reason, self.n_steps))

    def ask_set(self, frame: dict[str, Any]) -> None:
        """Switch the recipe at a step boundary, by the user's command."""
        at_step = frame.get("at_step")
        request = Request(frame.get("id", 0), str(frame.get("recipe")), at_step if isinstance(at_step, int) else 0)
        self._switch.ask(request, step=self.worker.step_base + self.n_steps, is_trainer=self.role == "trainer")

    def abandon(self, reason: str) -> None:
        """Take the hooks out now, whatever the training thread is doing."""
        self._remove(reason)

    def close(self) -> None:
        """Take out the optimizer hook, inert by now; after `gone`, by the agent's thread."""
        if not self._is_out:  # a signal of the user's came in between
            self._take_out(self.reason)
        self._unwatch_steps()
        self._switch.close()

    def status(self) -> dict[str, Any]:
        """Where the session stands, as sent in `status` and `detached` frames. Times are sums since attach."""
        n_unacked, unacked_bytes = self._transport.pending()
        return {
            "state": self.state.value,
            "role": self.role,
            "step": self.worker.step_base + self.n_steps,
            "steps": self.n_steps,
            "probed_steps": self.n_probed,
            "modules": len(self._probes),
            "recipes": self._switch.recipes,
            "eager_probe_steps": self._eager.is_on,
            "planted_probes": self._planted.is_on,
            "backlog": self.worker.backlog,
            "step_ns": self.total_step_ns,
            "probe_ns": self.total_hook_ns,
            "measure_ns": self._ledger.total_measure_ns,
            "contention_ns": self._budget.total_contention_ns,
            "max_overhead": self._config.max_overhead,
            "every": self._config.every,
            "steps_put_off": self._budget.n_late,
            "module_share": self._budget.share,
            "memory": self._memory.words(),
            "memory_peak_bytes": self._memory.peak_bytes,
            "memory_limit_bytes": self._memory.limit,
            "device_steps": self._device_steps.words(),
            "kernels": self._warm_up.words(),
            "kernels_ms": self._warm_up.took_ms,
            "n_dropped": self._transport.n_dropped_rows,
            "n_abandoned": self.worker.n_abandoned,
            "n_errors": self.guard.n_errors,
            "sent_bytes": self._transport.sent_bytes,
            "unacknowledged": n_unacked,
            "unacknowledged_bytes": unacked_bytes,
        }

    # Called in the training thread, by hooks.

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.state is State.GONE:
            return
        started = time.perf_counter_ns()
        try:
            if self._forked():
                return
            if self.state in (State.OBSERVING, State.SERVING):
                self._observe(optimizer)
            elif self.role == "trainer" and self._is_boundary(optimizer):
                self._end_step()
        except Exception as error:
            self.guard.swallow("optimizer step", error)
        self._clock.hook_ns += time.perf_counter_ns() - started

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
            if self.state is State.GONE:
                return
            self.role = "trainer"
            self._optimizer = weakref.ref(optimizer)
            base = completed_steps(optimizer)
            if base is not None:
                self.worker.put(lambda: self._set_base(base))
            self._install(roots)
            self._handles += [root.register_forward_pre_hook(self._on_root_enter) for root in roots]
            self._watch_with("milestones", lambda: self._milestones.watch(roots, optimizer))
            modules = self._linears()
            self._watch_with("replays", lambda: self._replays.watch(roots, modules))
            self._watch_with("log-probabilities", lambda: self._tokens.watch(roots))
            self._watch_with("norms", lambda: self._norms.watch(roots))
            flight = self._flight
            if flight is not None:
                self._watch_with("flight recorder", lambda: flight.watch(roots, not_to_be_hooked(roots)))
                flight.finish(step=0)  # the step just observed, of which the gradients are there
            self._begin_step()

    def _linears(self) -> dict[str, nn.Linear]:
        """Those probed: what can be computed again, and whose weights have versions."""
        return {name: p.module for name, p in self._probes.items() if isinstance(p.module, nn.Linear)}

    def _watch_with(self, what: str, watch: Callable[[], list[Any]]) -> None:
        """Hooks of one part of ours; where it cannot put them in, the others go on without it."""
        try:
            self._handles += watch()
        except Exception as error:
            self.guard.swallow(what, error)

    def _set_base(self, count: torch.Tensor) -> None:
        self.worker.step_base = int(count.item())
        self._schedule.align(self.worker.step_base)

    def _install(self, roots: list[nn.Module]) -> None:
        self._watch.close()
        self._watch.forget()  # it held the roots
        config = self._config
        self._entries = take_inventory(roots, config.layers)
        group, first_expert = token_group(roots), first_experts(roots)
        for misfit in find_misfits(self._entries):
            self._ledger.on_event(Event("coverage", "", "misfit", text=misfit))
        self._eager.look(any(is_compiled(module) for root in roots for module in root.modules()))
        self._compiled = {entry.name for entry in self._entries if entry.selected and entry.obstacle == COMPILED}
        for entry in self._entries:
            if entry.selected:
                first = first_expert.get(id(entry.module), 0)
                probe = probe_of(entry.module, every_expert=config.experts < 0, first_expert=first)
                self._probes[entry.name] = probe(
                    entry.name,
                    entry.module,
                    clock=self._clock,
                    guard=self.guard,
                    submit=self._submit,
                    max_rows=config.max_rows,
                    max_features=config.max_features,
                    trains=self.role == "trainer",
                    part=entry.part,
                    token_group=group,
                )
        self._planted.look(self._probes.values())
        self._memory.settle(list(self._probes.values()))
        self._device_steps = DeviceSteps.of(self._memory.device)
        first = next((p for each in self._probes.values() for p in each.module.parameters()), None)
        if first is not None and first.is_cuda:
            self._warm_up.begin(self.worker, first.device, first.dtype, config)
        self._signals.ensure_wrapped()
        self._clock.advance()
        self._roots = [weakref.ref(root) for root in roots]
        self.state = State.ATTACHED  # from here on `tick` looks whether the roots are still there
        names = [type(root).__name__ for root in roots]
        recipes = self._switch.look(roots)
        self.worker.put(lambda: self._announce(names, recipes))

    def _announce(self, roots: list[str], recipes: list[str]) -> None:
        """In the worker."""
        self._ledger.announce(
            roots=roots,
            role=self.role,
            n_modules=len(self._probes),
            recipes=recipes,
            kernels_ms=self._warm_up.took_ms,
        )

    def _on_serving_enter(self, module: nn.Module, roots: Any) -> None:
        """A root that serves begins a forward pass, in the thread that runs it."""
        if id(module) not in roots or self._forked():
            return
        try:
            with self._lock:
                if self.state is not State.SERVING:
                    return
                self.role = "rollout"
                self._install([module])
                self._handles.append(module.register_forward_hook(self._on_root_leave, always_call=True))
                self._handles.append(self._sync)
                self._sync.watch([module])
                self._begin_step()
        except Exception as error:
            self.guard.swallow("first serving pass", error)

    def _on_root_enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not in_backward():
            self._clock.micro_step += 1

    def _on_root_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.state is not State.ATTACHED or self._forked():
            return
        started = time.perf_counter_ns()
        try:
            self._end_step()
        except Exception as error:
            self.guard.swallow("serving pass", error)
        self._clock.hook_ns += time.perf_counter_ns() - started

    def _is_boundary(self, optimizer: torch.optim.Optimizer) -> bool:
        """True for a step of the optimizer that marks our steps; another of the model's may take over its part."""
        ours = self._optimizer() if self._optimizer is not None else None
        if optimizer is ours:
            self._foreign.clear()
            return True
        key = id(optimizer)
        self._foreign[key] = self._foreign.get(key, 0) + 1
        if ours is not None and self._foreign[key] < FOREIGN_STEPS:
            return False
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(is_stepped_by(p, owned) for entry in self._entries for p in entry.module.parameters()):
            if ours is None and self._foreign[key] >= FOREIGN_STEPS:
                self._remove("model_gone")
            return False
        self._optimizer = weakref.ref(optimizer)
        self._foreign.clear()
        return True

    def _end_step(self) -> None:
        clock, ledger, probes = self._clock, self._ledger, list(self._probes.values())
        self._eager.leave()
        self._planted.leave()
        clock.advance()
        for probe in probes:
            n_lost = probe.n_lost_gradients
            probe.finish_step()
            if not n_lost and probe.n_lost_gradients:
                self._ledger.on_event(Event("coverage", probe.name, "no_gradient", text=f"{probe.name}: {NO_GRADIENT}"))
        self._take_bare_weights(probes)
        generated = any_rollout(probes)
        for probe in probes:
            probe.forget()
        self._device_steps.mark(probed=clock.probed or clock.only_outputs)
        self._schedule.close(clock, generated=generated)
        self.n_steps += 1
        self.n_probed += clock.probed
        step, probed, step_ns = clock.step, clock.probed, clock.step_ns
        hook_ns = clock.hook_ns + self._signals.take_ns()
        self.total_step_ns += step_ns
        self.total_hook_ns += hook_ns
        measuring = self._measuring or self.worker.backlog > 0
        self._budget.charge(
            step_ns,
            hook_ns,
            measuring=measuring,
            probed=clock.probed or clock.only_outputs,
            slower=clock.probed and self._eager.is_on,
        )
        ended_ns = time.time_ns()
        hand_over = self.worker.put if probed or clock.only_outputs else self.worker.put_quietly
        hand_over(lambda: ledger.record_step(step, ended_ns, probed=probed, step_ns=step_ns, hook_ns=hook_ns))
        if probed:
            self.worker.put(lambda: self._memory.look(self.worker.stream_of(self._memory.where)))
        self._signals.ensure_wrapped()
        self._milestones.finish(self._optimizer() if self._optimizer is not None else None)
        measured = self._tokens.finish()
        if measured is not None:
            tell = self._tokens.tell
            self.worker.put(self._memory.held_for(measured, lambda: ledger.record_rollouts(measured, tell)))
        if self.role == "rollout" and (self._sync.is_due or clock.probed):
            held = self._sync.take(self._live_roots(), self._memory.reserve)
            if held is not None:
                self.worker.put(self._memory.held_for(held, lambda: ledger.record_held(held, step)))
        weights = self._norms.finish()
        if weights is not None:
            self.worker.put(lambda: ledger.record_norms(weights, step))
        if self._flight is not None:
            self._flight.finish(step)
        replayed = None if self.detach_asked else self._replays.run()
        if replayed is not None:
            self.worker.put(lambda: ledger.record_replay(replayed))
        clock.next()
        if self.role == "trainer":
            self._switch.at_boundary(self._live_roots(), self.worker.step_base + self.n_steps)
        if self.detach_asked:
            self._remove(self.detach_asked)
        else:
            self._begin_step()

    def _take_bare_weights(self, probes: list[ModuleProbe]) -> None:
        """Of compiled modules whose turn it was, in a step that weights are measured in."""
        step = self._clock.step
        if self._clock.with_weights and self._compiled and not self._eager.is_on:
            due = [each for each in probes if each.name in self._compiled and each.last_probed == step]
            unseen = [each for each in due if not each.train_rows]
            for snapshot in copy_weights(step, unseen, self._config.max_features):
                self._submit(snapshot)

    def _begin_step(self) -> None:
        clock = self._clock
        self._measuring = self.worker.backlog > 0
        busy = self._measuring or self._warm_up.is_busy
        if self.role == "trainer" and not busy and self._schedule.is_near(clock.step, RECENT):
            probes = self._probes
            routers = {name: p.module for name, p in probes.items() if is_router(p.module)}
            copies = copy_versions(clock.step, {**self._linears(), **routers})
            copies += copy_expert_versions(clock.step, (p for p in probes.values() if isinstance(p, ExpertsProbe)))
            self.worker.put(self._memory.held_for(copies, lambda: self.worker.keep_versions(copies)))
        affordable = self._budget.affords_probe()
        if not affordable and self._schedule.is_due(clock.step):
            self._budget.put_off()
        self._schedule.plan(clock, busy=busy, affordable=affordable)
        self._replays.plan(affordable=affordable)
        if clock.probed or clock.only_outputs:
            with self._lock:
                if self.state is not State.GONE:  # another thread may just have taken everything out
                    self._arm()

    def _arm(self) -> None:
        clock = self._clock
        self._tokens.arm()
        self._norms.arm()
        if clock.probed:
            self._eager.enter()
            self._planted.arm()
            for event in self._budget.begin_probe():
                self._ledger.on_event(event)
        for probe in self._memory.choose(list(self._probes.values()), self._budget.share):
            probe.arm()

    def _forked(self) -> bool:
        """In a child process there is no thread of ours to hand anything to."""
        if os.getpid() == self._pid:
            return False
        for probe in self._probes.values():
            probe.armed = False
        self.state = State.GONE
        return True

    def _submit(self, snapshot: Any) -> None:
        self._memory.take(snapshot)
        self.worker.submit(snapshot)

    def _on_signals(self, rows: list[dict[str, Any]]) -> None:
        self._ledger.on_signals(rows, self.n_steps if self.role == "trainer" else None)

    def _module_rows(self) -> Iterable[dict[str, Any]]:
        return module_rows(self._entries, self._probes)

    def _remove(self, reason: str) -> None:
        """Every hook out and every patch undone; once. The last rows go to the worker."""
        with self._lock:
            if self.state is State.GONE:
                return
            was_attached = self.state is State.ATTACHED or self.role == METRICS
            self.state = State.GONE
            self.reason = reason
        try:
            self._take_out(reason)
            if was_attached:
                self._sum_up()
                self.worker.put(lambda: self._ledger.farewell(reason, self.n_steps))
        finally:
            self.gone.set()

    def _sum_up(self) -> None:
        for kind, words in ((memory.EVENT, self._memory.words()), (device_steps.EVENT, self._device_steps.words())):
            if words and self.role != METRICS:
                self._ledger.on_event(Event(kind, "", "summary", text=words))

    def _take_out(self, reason: str) -> None:
        removals: list[Callable[[], None]] = [self._watch.close, self._signals.unwrap, self._eager.leave]
        removals += [self._planted.leave]
        removals += [lambda: self._switch.leave(reason), self._milestones.remove, self._tokens.remove]
        removals += [handle.remove for handle in self._handles]
        removals += [probe.remove for probe in self._probes.values()]
        for remove in removals:
            try:
                remove()
            except Exception as error:
                self.guard.swallow("removing hooks", error)
        self._is_out = True


def _has_linear(module: nn.Module) -> bool:
    """Something to measure: a GEMM that an adapter knows, or an engine's weight that can be compared."""
    return any(adapter_of(m) is not None for m in module.modules()) or any(
        isinstance(each, HeldWeight) for each in weights_of(module)
    )
