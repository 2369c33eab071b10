"""The operands and outputs of every probed module: one `ModuleProbe` each, in for the steps that are probed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import nn

from mxprobe.agent.budget import Budget
from mxprobe.agent.context import Context
from mxprobe.agent.module_rows import NO_GRADIENT, module_rows
from mxprobe.agent.part import Job, Part
from mxprobe.agent.phases import Phases
from mxprobe.agent.probes.module_probe import ModuleProbe, any_rollout
from mxprobe.agent.probes.router_probe import probe_of
from mxprobe.events import Event
from mxprobe.measuring.adapters.expert_numbers import first_experts
from mxprobe.measuring.adapters.token_groups import token_group
from mxprobe.measuring.adapters.weight_modules import COMPILED, Entry, misfits, take_inventory
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.operands.bare_weights import copy_weights
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.recipes import Recipe
from mxprobe.measuring.step_rows import measure_step
from mxprobe.schema import Phase, TableRow

if TYPE_CHECKING:  # `typing` would keep what it is asked for here, and with it the modules of every attach
    AnySnapshot = Union[Snapshot, ExpertsSnapshot]

_PLACE = ("phase", "role", "expert", "recipe")
"""Data of an event that say what it is about, beside its subject."""


class ProbedModules(Part):
    name = "probed modules"

    def __init__(self, context: Context, budget: Budget, phases: Phases) -> None:
        self.probes: dict[str, ModuleProbe] = {}
        self._context = context
        self._budget = budget
        self._phases = phases
        self._entries: list[Entry] = []
        self._compiled: set[str] = set()
        self._snapshots: list[AnySnapshot] = []
        """Copied in the step under way."""
        self._recipes: dict[tuple[str, str], Recipe] = {}
        """The last exact recipe of each (module, phase)."""
        self._told: dict[tuple[str, str, int], Event] = {}
        """What was told of each (module, phase, expert)."""
        self._found: set[tuple[Any, ...]] = set()

    def linears(self) -> dict[str, nn.Linear]:
        """Return those that can be computed again, and whose weights have versions."""
        return {name: p.module for name, p in self.probes.items() if isinstance(p.module, nn.Linear)}

    def watch(self, roots: Sequence[nn.Module]) -> None:
        context, config = self._context, self._context.config
        self._entries = take_inventory(list(roots), config.layers)
        group, first_expert = token_group(roots), first_experts(roots)
        for detail in misfits(self._entries):
            context.events.tell(Event("coverage", "", "misfit", text=detail))
        self._compiled = {entry.name for entry in self._entries if entry.selected and entry.obstacle == COMPILED}
        for entry in self._entries:
            if entry.selected:
                first = first_expert.get(id(entry.module), 0)
                probe = probe_of(entry.module, every_expert=config.experts < 0, first_expert=first)
                self.probes[entry.name] = probe(
                    entry.name,
                    entry.module,
                    clock=context.clock,
                    guard=context.guard,
                    submit=self._take,
                    max_rows=config.max_rows,
                    max_features=config.max_features,
                    trains=context.run.is_trainer,
                    part=entry.part,
                    token_group=group,
                    phases=self._phases,
                )
        context.memory.settle(list(self.probes.values()))

    def begin(self) -> None:
        if self._context.clock.is_watched:
            for probe in self._context.memory.choose(list(self.probes.values()), self._budget.share):
                probe.arm()

    def _take(self, snapshot: AnySnapshot) -> None:
        self._context.memory.take(snapshot)
        self._snapshots.append(snapshot)

    def finish(self) -> Iterable[Job]:
        context, clock, probes = self._context, self._context.clock, list(self.probes.values())
        for probe in probes:
            n_lost = probe.n_lost_gradients
            context.guard.attempt(f"end of a step of {probe.name}", probe.finish_step)
            if not n_lost and probe.n_lost_gradients:
                context.events.tell(Event("coverage", probe.name, "no_gradient", text=f"{probe.name}: {NO_GRADIENT}"))
        self._take_bare_weights(probes)
        clock.generated = any_rollout(probes)
        for probe in probes:
            probe.forget()
        by_device: dict[torch.device, list[AnySnapshot]] = {}
        snapshots, self._snapshots = self._snapshots, []
        for snapshot in snapshots:
            by_device.setdefault(snapshot.x.device, []).append(snapshot)
        return [self._job(device, here) for device, here in by_device.items()]

    def _job(self, device: torch.device, snapshots: list[AnySnapshot]) -> Job:
        return Job(
            lambda: self._measure(snapshots), device, [each.ready for each in snapshots], n_snapshots=len(snapshots)
        )

    def _take_bare_weights(self, probes: list[ModuleProbe]) -> None:
        """Copy those of compiled modules whose turn it was, in a step that weights are measured in."""
        clock = self._context.clock
        if clock.with_weights and self._compiled and not clock.is_slower:
            due = [each for each in probes if each.name in self._compiled and each.last_probed == clock.step]
            unseen = [each for each in due if not each.train_rows]
            for snapshot in copy_weights(clock.step, unseen, self._context.config.max_features):
                self._take(snapshot)

    def _measure(self, snapshots: list[AnySnapshot]) -> Iterable[TableRow]:
        """In the worker."""
        context = self._context
        context.history.generates |= any(each.phase == Phase.ROLLOUT.value for each in snapshots)
        rows = measure_step(
            snapshots,
            context.config,
            recipes=self._recipes,
            history=context.history,
            told=self._told,
            swallow=context.guard.swallow,
        )
        return (found for found in rows if found[0] != "events" or self._is_first(found[1]))

    def _is_first(self, event: dict[str, Any]) -> bool:
        """Whether a finding is new, by kind, state and place: a run that went NaN would tell it at every step."""
        told: Event = event["event"]
        finding = (told.kind, told.subject, told.state, *(told.data.get(name) for name in _PLACE))
        new = finding not in self._found
        self._found.add(finding)
        return new

    def remove(self) -> None:
        for probe in self.probes.values():
            self._context.guard.attempt("removing hooks", probe.remove)

    def rows(self) -> Iterable[TableRow]:
        return [("modules", row) for row in module_rows(self._entries, self.probes)]

    def status(self) -> dict[str, Any]:
        return {"modules": len(self.probes)}
