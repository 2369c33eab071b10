"""What the agent costs: counted for each step, told in table `overhead` and in status, and held against the budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mxprobe.agent.budget import Budget
from mxprobe.agent.context import Context
from mxprobe.agent.part import Job
from mxprobe.schema import TableRow


class Accounts:
    """`begin` and `finish` around each step, in the training thread."""

    def __init__(self, context: Context, budget: Budget) -> None:
        self._context = context
        self._budget = budget
        self._step_ns = self._hook_ns = 0
        self._measuring = False
        """Our thread was at work when this step began."""

    def begin(self, *, is_busy: bool) -> None:
        """Let the schedule say what of the step that begins is measured. `is_busy`: nothing of it can be."""
        context, clock, budget = self._context, self._context.clock, self._budget
        self._measuring = context.worker.backlog > 0
        clock.is_affordable = budget.affords_probe()
        if not clock.is_affordable and context.schedule.is_due(clock.step):
            budget.put_off()
        context.schedule.plan(clock, busy=self._measuring or is_busy, affordable=clock.is_affordable)
        if clock.probed:
            for event in budget.begin_probe():
                context.events.tell(event)

    def finish(self) -> Job:
        """Book the step that is over; returns the job that writes its row."""
        context, clock, run = self._context, self._context.clock, self._context.run
        context.schedule.close(clock)
        run.n_steps += 1
        run.n_probed += clock.probed
        self._step_ns += clock.step_ns
        self._hook_ns += clock.hook_ns
        measuring = self._measuring or context.worker.backlog > 0
        how = {"measuring": measuring, "probed": clock.is_watched, "slower": clock.is_slower}
        self._budget.charge(clock.step_ns, clock.hook_ns, **how)
        row = {"step": clock.step, "time_ns": clock.ended_ns, "probed": clock.probed}
        row.update(step_ns=clock.step_ns, probe_ns=clock.hook_ns)
        return Job(lambda: self._rows(row), is_urgent=clock.is_watched, flush=clock.probed)

    def _rows(self, row: dict[str, Any]) -> Iterable[TableRow]:
        """In the worker."""
        context = self._context
        measured = {"measure_ns": context.worker.take_measure_ns(), "n_errors": context.guard.n_errors}
        sent = {"n_dropped": context.transport.n_dropped_rows, "sent_bytes": context.transport.sent_bytes}
        return [("overhead", {**row, **measured, **sent})]

    def status(self) -> dict[str, Any]:
        """Times are sums since attach."""
        context, budget, transport = self._context, self._budget, self._context.transport
        n_unacked, unacked_bytes = transport.pending()
        return {
            "step": context.recorder.step_base + context.run.n_steps,
            "steps": context.run.n_steps,
            "probed_steps": context.run.n_probed,
            "backlog": context.worker.backlog,
            "step_ns": self._step_ns,
            "probe_ns": self._hook_ns,
            "measure_ns": context.worker.measure_ns,
            "contention_ns": budget.total_contention_ns,
            "max_overhead": context.config.max_overhead,
            "every": context.config.every,
            "steps_put_off": budget.n_late,
            "module_share": budget.share,
            "n_dropped": transport.n_dropped_rows,
            "n_abandoned": context.worker.n_abandoned,
            "n_errors": context.guard.n_errors,
            "sent_bytes": transport.sent_bytes,
            "unacknowledged": n_unacked,
            "unacknowledged_bytes": unacked_bytes,
        }
