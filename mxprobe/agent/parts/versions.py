"""The weights as of each step around a probed one: which of them a rollout uses, and what the optimizer reaches."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from mxprobe.agent.context import Context
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.agent.parts.probed_modules import ProbedModules
from mxprobe.agent.probes.expert_versions import copy_expert_versions
from mxprobe.agent.probes.experts_probe import ExpertsProbe
from mxprobe.measuring.adapters.expert_structure import is_router
from mxprobe.measuring.engines.fingerprints import trainer_rows
from mxprobe.measuring.sampling import spread
from mxprobe.measuring.versions.weight_history import RECENT, Copies, Version, copy_versions
from mxprobe.measuring.versions.weight_updates import update_row
from mxprobe.schema import WEIGHT_CODES, TableRow

UPDATES_EVERY = RECENT + 1
"""Steps between two rows of table `updates`: once in a group of versions."""


class Versions(Part):
    name = "versions of the weights"
    roles = (TRAINER,)

    def __init__(self, context: Context, modules: ProbedModules) -> None:
        self._context = context
        self._modules = modules
        self._due: dict[str, int] = {}
        """Module -> the step from which on its next row of `updates` is due."""

    def begin(self) -> None:
        clock, probes = self._context.clock, self._modules.probes
        if not clock.keeps_versions:
            return
        routers = {name: p.module for name, p in probes.items() if is_router(p.module)}
        copies = copy_versions(clock.step, {**self._modules.linears(), **routers})
        copies += copy_expert_versions(clock.step, (p for p in probes.values() if isinstance(p, ExpertsProbe)))
        for each in copies:
            self._context.hand_over(Job(lambda each=each: self._keep(each), each.device, [each.ready], each))

    def _keep(self, copies: Copies) -> Iterable[TableRow]:
        """In the worker."""
        history, worker = self._context.history, self._context.worker
        history.keep(copies)
        if worker.is_stopping:
            return
        for name, version in copies.versions.items():
            yield from self._hashed(name, version, copies.out_features.get(name, 0))
            newest = history.newest(name)
            if len(newest) == 3 and self._due.get(name, 0) <= version.step:
                self._due[name] = version.step + UPDATES_EVERY
                yield "updates", self._update(name, *newest)
        if not history.generates:
            for stack in copies.stacks:
                for row in stack.table_rows():
                    yield WEIGHT_CODES, row

    def _hashed(self, name: str, version: Version, out_features: int) -> Iterable[TableRow]:
        """Rows for engines elsewhere; a process that generates is asked by its outputs, see `WeightHistory`."""
        if not out_features or self._context.history.generates:
            return []
        index = spread(len(version.weight), out_features)
        rows = trainer_rows(name, version.weight, index, out_features, step=version.step)
        return [(WEIGHT_CODES, row) for row in rows]

    def _update(self, name: str, earlier: Version, before: Version, now: Version) -> dict[str, Any]:
        rule = self._context.config.rule
        values = update_row(earlier.weight, before.weight, now.weight, rule=rule)
        steps = {"step": now.step, "from_step": before.step}
        return {**steps, "time_ns": time.time_ns(), "module": name, "format": "mxfp4", "rule": rule, **values}
