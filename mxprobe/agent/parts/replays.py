"""Replays in the running job: one call of a root captured in a step that is due, run again at the step's end.

The first training call of the step whose root returns a policy is taken. Both happen in the training thread; rows
are read off the device in the worker. A model that cannot be replayed is left alone from then on, and an event of
kind `sensitivity` says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.guard import Hook
from mxprobe.agent.memory import megabytes
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.agent.replay_allowance import Allowance, Plan, shapes_of
from mxprobe.events import Event
from mxprobe.measuring.adapters.expert_structure import is_router
from mxprobe.measuring.compat import in_backward
from mxprobe.measuring.interruptions import is_of_a_signal_handler
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.replay.arms import ROUTED, Arm, replay_arms
from mxprobe.measuring.replay.captured_call import Call, capture
from mxprobe.measuring.replay.floor import Floor, measure_floor
from mxprobe.measuring.replay.gradient_probes import probe_gradients
from mxprobe.measuring.replay.policy_output import TOKEN_ARGUMENT, PolicyGradient, PolicyOutput, find_policy
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.measuring.replay.sensitivity import CPU_MAX_ROWS, DEVICE_MAX_ROWS, Sensitivity, measure_sensitivity
from mxprobe.measuring.replay.sharded import is_sharded
from mxprobe.measuring.sampling import seed_of
from mxprobe.schema import TableRow

EVENT = "sensitivity"
MAX_GRADIENT_BYTES = 1 << 30
"""Larger gradients at the policy are not kept, and the arms of such a replay run forwards only."""
HEAD_START = 10
"""The first sensitivity comes after a tenth of its period: a short attach is not charged, a long one soon has it."""
KEPT_WIDER = ("mxfp8",)
"""Corrections whose own Delta2 is measured beside the error's: what a module kept in that format would still do."""
REPLAY_FACTOR = 11
"""A replay with all arms, gradients and directions, in times of one for sensitivity of as many rows: measured by
benchmarks/sensitivity.py at 3 and at 6 times the rows that sensitivity takes."""
Rows = Callable[[], "list[TableRow]"]
"""Steps before attach -> (table, row); waits for the device, so the worker calls it."""


class Replays(Part):
    name = "replays"
    roles = (TRAINER,)

    def __init__(self, context: Context, linears: Callable[[], Mapping[str, nn.Linear]]) -> None:
        """`linears`: returns the modules that are probed and can be computed again, by name."""
        config = context.config
        self._context = context
        self._config = config
        self._clock = context.clock
        self._linears = linears
        self._allowance = Allowance(context.memory, lambda: context.worker.backlog > 0, self._tell)
        self._handles: list[Any] = []
        self._modules: dict[str, nn.Linear] = {}
        self._remaining: set[str] = set()
        """Modules whose turn has not come in this round: those that fit into one replay are measured at a time."""
        self._next = {"sensitivity": 1 + config.sensitivity_every // HEAD_START, "replays": 1}
        self._wanted: set[str] = set()
        self._given_up = False
        self._unsuited: set[int] = set()
        self._told: set[tuple[str, str, int]] = set()
        self.forget()

    @property
    def is_on(self) -> bool:
        return self._config.sensitivity_every > 0 or self._config.replay_every > 0

    def forget(self) -> None:
        self._entered: Call | None = None
        self._call: Call | None = None
        self._mask: torch.Tensor | None = None
        self._at_policy: dict[str, torch.Tensor] = {}
        self._policy_shape: tuple[int, ...] = ()
        self._micro_step = 0

    def watch(self, roots: Sequence[nn.Module]) -> None:
        if not self.is_on:
            return
        self._modules = dict(self._linears())
        inner = [module for root in roots for module in root.modules() if module is not root]
        sharded = [module for module in inner if is_sharded(module)]  # may fail, unlike what follows
        on_gathered = self._hook(
            "copying gathered parameters", self._on_gathered, when=lambda: self._entered is not None
        )
        on_enter = self._hook(
            "capturing a call", self._on_enter, when=lambda: self._call is None and bool(self._wanted)
        )
        on_leave = self._hook("reading a policy", self._on_leave, when=lambda: self._entered is not None)
        self._handles += [module.register_forward_pre_hook(on_gathered) for module in sharded]
        for root in roots:
            self._handles.append(root.register_forward_pre_hook(on_enter, with_kwargs=True))
            self._handles.append(root.register_forward_hook(on_leave))

    def _hook(self, where: str, act: Callable[..., None], when: Callable[[], bool] | None = None) -> Hook:
        """Return a hook after whose failure nothing is replayed any more."""
        return self._context.guard.hook(where, act, when=when, then=lambda error: self._give_up(_failed(where, error)))

    def _is_wanted(self) -> bool:
        return bool(self._wanted) and self._call is None

    def _is_inside(self) -> bool:
        """A call that is captured is under way."""
        return self._entered is not None

    def remove(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            self._context.guard.attempt("removing hooks", handle.remove)

    def begin(self) -> None:
        """Decide what the step is for. What was due and could not be had, or afforded, stays due."""
        if not self._clock.is_affordable:
            return
        every = {"sensitivity": self._config.sensitivity_every, "replays": self._config.replay_every}
        for what, n in every.items():
            if n and not self._given_up and self._clock.step >= self._next[what]:
                self._wanted.add(what)

    def _on_enter(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None:  # taken out by another hook of the same call
            return
        if id(root) in self._unsuited or not torch.is_grad_enabled() or in_backward():
            return
        try:
            self._entered = capture(root, args, kwargs) if self._modules else None
            self._micro_step = max(self._clock.micro_step, 0)
            self._copy_gathered(root)
        except NotReplayableError as error:
            self._give_up(str(error))

    def _on_gathered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """FSDP has just put this module's parameters together."""
        if not in_backward():
            self._copy_gathered(module)

    def _copy_gathered(self, module: nn.Module) -> None:
        if self._entered is None or self._entered.whole is None:
            return
        try:
            self._entered.whole.take(module)
        except NotReplayableError as error:
            self._give_up(str(error))

    def _on_leave(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call, self._entered = self._entered, None
        if call is None:
            return
        policy = find_policy(output)
        if policy is None:
            self._unsuited.add(id(root))
            name = type(root).__name__
            self._tell("no_policy", f"{name} returns neither logits [B, T, V] nor log-probabilities: skipped", name)
        else:
            self._call, self._policy_shape = call, tuple(policy.tensor.shape)
            self._watch_gradient(policy)

    def _watch_gradient(self, policy: PolicyOutput) -> None:
        """The positions that the loss reads are those that get a gradient; for arms the gradient itself is kept."""
        call, keeps = self._call, "replays" in self._wanted
        known = policy.label_mask is not None

        def watch(name: str, output: torch.Tensor) -> None:
            fits = output.numel() * output.element_size() <= MAX_GRADIENT_BYTES

            def on_gradient(gradient: torch.Tensor) -> None:
                if self._call is not call or name in self._at_policy:
                    return
                with undisturbed(gradient.device.type):
                    if name == "tensor" and not known and self._mask is None:
                        mask = gradient != 0
                        self._mask = mask if mask.dim() == 2 else mask.any(-1)
                    if keeps and fits:
                        self._at_policy[name] = gradient.detach().clone()

            output.register_hook(self._hook("reading a gradient", on_gradient))

        if policy.tensor.requires_grad and (keeps or not known):
            watch("tensor", policy.tensor)
        if keeps and policy.entropy is not None and policy.entropy.requires_grad:
            watch("entropy", policy.entropy)

    def finish(self) -> Iterable[Job]:
        rows = None if self._clock.is_last else self.run()
        return () if rows is None else [Job(rows)]

    def run(self) -> Rows | None:
        """Replay what was captured. Returns what makes the rows, or None if there are none."""
        call, mask, micro_step, policy_shape = self._call, self._mask, self._micro_step, self._policy_shape
        gradient = PolicyGradient(self._at_policy.get("tensor"), self._at_policy.get("entropy"))
        self.forget()
        if call is None or self._given_up:
            return None
        if in_backward():
            self._give_up("the optimizer steps inside the backward pass")
            return None
        started = time.perf_counter_ns()
        try:
            shapes = shapes_of(call, self._modules, policy_shape, gradient)
            plan = self._allowance.plan(frozenset(self._wanted), call, shapes, self._config.gradient_probes)
            self._reschedule(plan.skipped)
            if not plan.runs:
                return None
            before = self._allowance.begin(call)
            made = self._measure(call, mask, gradient, plan)
            self._allowance.end(call, plan, before)
        except NotReplayableError as error:
            self._give_up(str(error))
            return None
        except Exception as error:
            reason = _failed("replaying a call", error)
            self._context.guard.swallow("replaying a call", error, lambda: self._give_up(reason))
            return None
        spent_ms = (time.perf_counter_ns() - started) / 1e6
        held = megabytes(max(plan.needs[what] for what in plan.runs))
        self._tell(
            "first_" + "_".join(sorted(plan.runs)),
            f"{', '.join(sorted(plan.runs))}: the first replay took {spent_ms:.0f} ms of the training thread, and held "
            f"{held} at most (estimated)",
        )
        if not self._config.replay_every:
            step_ms, whole_ms = max(self._clock.step_ns / 1e6, 1e-3), REPLAY_FACTOR * _times_the_rows(call) * spent_ms
            self._tell(
                "replays_off",
                f"replays under other roundings are off: one would take about {whole_ms:.0f} ms and hold "
                f"{megabytes(shapes.of_arms(self._config.gradient_probes))} at most (both estimated), so that "
                f"--replay-every 1000 would cost {whole_ms / step_ms / 1000:.1%} of steps of {step_ms:.0f} ms",
            )
        self._reschedule(plan.runs)
        return self._rows(self._clock.step, micro_step, *made)

    def _reschedule(self, done: frozenset[str]) -> None:
        every = {"sensitivity": self._config.sensitivity_every, "replays": self._config.replay_every}
        for what in done:
            self._next[what] = self._clock.step + every[what]
        self._wanted -= done

    def _measure(
        self, call: Call, mask: torch.Tensor | None, gradient: PolicyGradient, plan: Plan
    ) -> tuple[Sensitivity | None, list[Arm], list[dict[str, Any]], Floor | None]:
        config, seed = self._config, seed_of(self._clock.step, "replay")
        sensitivity = None
        if "sensitivity" in plan.runs:
            self._remaining = self._remaining or set(self._modules)
            sensitivity = measure_sensitivity(
                call,
                self._modules,
                record=self._remaining,
                mask=mask,
                format=config.format,
                rule=config.rule,
                corrections=KEPT_WIDER,
                seed=seed,
                max_rows=plan.max_rows,
                in_parts_only=plan.in_parts_only,
            )
            self._remaining &= sensitivity.skipped
            if sensitivity.unreached:
                example = sorted(sensitivity.unreached)[0]
                self._tell(
                    "no_gradient",
                    f"no gradient reaches {len(sensitivity.unreached)} modules ({example}, ...): they stand below "
                    "frozen ones or in a region with reentrant activation checkpointing",
                    example,
                    len(sensitivity.unreached),
                )
        arms: list[Arm] = []
        if "replays" in plan.runs:
            arms = list(
                replay_arms(
                    call,
                    self._modules,
                    (*config.replay_arms, *self._of_routing(call)),
                    mask=mask,
                    gradient=gradient if any(each is not None for each in gradient) else None,
                    format=config.format,
                    rule=config.rule,
                    seed=seed,
                )
            )
            if self._of_routing(call) and all(arm.name != ROUTED for arm in arms):
                self._tell(
                    "no_routing_replay",
                    "the effect of routing replay is not measured: a router does not return the experts it chose",
                )
            if arms and not arms[0].gradients:
                self._tell(
                    "forwards_only",
                    "replays run forwards only: no gradient is known at the policy, or none reaches the Linears",
                )
        probes = self._probe_gradients(call, gradient, seed) if arms and arms[0].gradients else []
        floor = self._measure_floor(call, mask) if "replays" in plan.runs else None
        return sensitivity, arms, probes, floor

    def _of_routing(self, call: Call) -> tuple[str, ...]:
        """The arm that says what routing replay would leave, of a mixture of experts."""
        has_router = any(is_router(module) for module in call.module.modules())
        return (ROUTED,) if has_router and ROUTED not in self._config.replay_arms else ()

    def _measure_floor(self, call: Call, mask: torch.Tensor | None) -> Floor | None:
        """None where the model does not take its batch in parts; replays go on without it."""
        try:
            return measure_floor(call, self._modules, mask=mask)
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            why = f"the batch cannot be put together otherwise ({type(error).__name__}: {error})"
            self._tell("no_floor", f"no floor: {why}")
            return None

    def _probe_gradients(self, call: Call, gradient: PolicyGradient, seed: int) -> list[dict[str, Any]]:
        config = self._config
        if config.gradient_probes < 1:
            return []
        n_probes, how = config.gradient_probes, {"format": config.format, "rule": config.rule}
        return probe_gradients(call, self._modules, gradient, n_probes=n_probes, seed=seed, **how)

    def _rows(
        self,
        step: int,
        micro_step: int,
        sensitivity: Sensitivity | None,
        arms: list[Arm],
        probes: list[dict[str, Any]],
        floor: Floor | None,
    ) -> Rows:
        config, now = self._config, time.time_ns()

        def rows() -> list[TableRow]:
            when: dict[str, Any] = {
                "step": step,
                "micro_step": micro_step,
                "time_ns": now,
                "format": config.format,
                "rule": config.rule,
            }
            found: list[TableRow] = []
            if sensitivity is not None:
                found += [("sensitivity", {**when, **row}) for row in sensitivity.rows()]
            if any(not arm.holds for arm in arms):
                self._tell(
                    "no_routing_replay",
                    "the effect of routing replay is not measured: a router's weights are no function known here",
                )
            held = [arm for arm in arms if arm.holds]
            measured = [*held, floor.arm] if floor is not None else held
            found += [("replays", {**when, "n_modules": len(self._modules), **arm.row()}) for arm in measured]
            at = {name: when[name] for name in ("step", "micro_step", "time_ns")}
            for each in (floor, *(arm.representation for arm in arms)):
                if each is not None:
                    found += [("layers", {**at, **row}) for row in each.rows()]
            found += [("replay_gradients", {**when, **row}) for arm in arms for row in arm.gradient_rows()]
            found += [("gradient_probes", {**when, **row}) for row in probes]
            return found

        return rows

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._wanted.clear()
        self.forget()
        self._tell("no_replay", f"no replay: {reason}")

    def _tell(self, state: str, words: str, subject: str = "", n_modules: int = 0) -> None:
        """Tell of a state of a subject once, with the words of its first time."""
        about = (state, subject, n_modules)
        if about not in self._told:
            self._told.add(about)
            data = {"n_modules": n_modules} if n_modules else {}
            self._context.events.tell(Event(EVENT, subject, state, data, words))


def _failed(where: str, error: Exception) -> str:
    return f"{where} failed ({type(error).__name__})"


def _times_the_rows(call: Call) -> float:
    """Rows of the batch over those that sensitivity replays; 3 where they are not known."""
    ids = call.argument(TOKEN_ARGUMENT)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return 3.0
    return max(ids.numel() / (CPU_MAX_ROWS if ids.device.type == "cpu" else DEVICE_MAX_ROWS), 1.0)
