"""What the probe may cost: never more than the limit, whatever a probe costs."""

from __future__ import annotations

import random

import pytest

from mxprobe.agent.budget import MIN_SHARE, Budget, loss
from mxprobe.agent.clock import Clock
from mxprobe.agent.schedule import Schedule

STEP_NS = 1_000_000_000


class Run:
    """Steps of a second; a probe costs `probe_ns` for all modules and keeps our thread busy for `busy` steps."""

    def __init__(self, limit: float, *, probe_ns: int, every: int = 10, busy: int = 0, lost_ns: int = 0) -> None:
        self.budget, self.schedule, self.clock = Budget(limit, every), Schedule(every, 10**9), Clock()
        self.probe_ns, self.busy, self.lost_ns, self.every = probe_ns, busy, lost_ns, every
        self.spent_ns = self.total_ns = 0
        self.told: list[str] = []
        self.probes: list[int] = []

    def steps(self, n: int) -> None:
        random.seed(0)
        left = 0
        for _ in range(n):
            affordable = self.budget.affords_probe()
            if not affordable and self.schedule.is_due(self.clock.step):
                self.budget.put_off()
            self.schedule.plan(self.clock, busy=left > 0, affordable=affordable)
            if self.clock.probed:
                self.probes.append(self.clock.step)
                self.told += [event.words for event in self.budget.begin_probe()]
                left = self.busy + 1
            hook_ns = int(self.probe_ns * self.budget.share) if self.clock.probed else 0
            measuring = left > 0
            lost_ns = self.lost_ns if measuring and not self.clock.probed else 0
            step_ns = STEP_NS + hook_ns + lost_ns + random.randrange(STEP_NS // 1000)
            self.budget.charge(step_ns, hook_ns, measuring=measuring, probed=self.clock.probed)
            self.spent_ns += hook_ns + lost_ns
            self.total_ns += step_ns
            left -= left > 0
            self.clock.generated = True
            self.schedule.close(self.clock)
            self.clock.next()


def test_a_cheap_probe_keeps_its_schedule() -> None:
    run = Run(0.03, probe_ns=STEP_NS // 5)
    run.steps(101)
    assert run.probes == list(range(1, 102, 10))
    assert (run.told, run.budget.share, run.budget.n_late) == ([], 1.0, 0)


def test_without_a_limit_nothing_is_put_off() -> None:
    run = Run(0.0, probe_ns=20 * STEP_NS)
    run.steps(101)
    assert run.probes == list(range(1, 102, 10))


@pytest.mark.parametrize("probe_ns", [STEP_NS // 2, STEP_NS, 20 * STEP_NS])
def test_an_expensive_probe_is_put_off_until_it_is_paid_for(probe_ns: int) -> None:
    run = Run(0.03, probe_ns=probe_ns)
    run.steps(3000)
    first_ns = probe_ns
    assert run.spent_ns <= 0.03 * run.total_ns + first_ns
    assert len(run.probes) > 2, "put off, not given up"
    assert run.told[0] == "probes come later than every 10 steps, to cost 3.0% at most"


def test_a_probe_that_waits_very_long_measures_fewer_modules_in_turn() -> None:
    run = Run(0.03, probe_ns=10 * STEP_NS)
    run.steps(4000)
    assert MIN_SHARE <= run.budget.share < 1
    assert run.told[1] == "each probed step measures 50.00% of the modules, in turn"
    gaps = [after - before for before, after in zip(run.probes, run.probes[1:], strict=False)]
    assert max(gaps[-3:]) < max(gaps[:2])


def test_what_the_run_loses_to_the_measuring_thread_is_charged() -> None:
    run = Run(0.03, probe_ns=0, busy=5, lost_ns=STEP_NS // 10)
    run.steps(1000)
    assert run.budget.contention_ns == pytest.approx(STEP_NS // 10, rel=0.05)
    late = [after - before for before, after in zip(run.probes, run.probes[1:], strict=False)][-10:]
    assert min(late) >= 16, "5 steps lose 10% each: one probe in 17 steps costs 3%"


def test_noise_is_no_loss() -> None:
    generator = random.Random(0)
    false = 0
    for _ in range(200):
        beside, alone = ([int(generator.gauss(1e9, 1e8)) for _ in range(64)] for _ in range(2))
        false += loss(beside, alone) > 0
    assert false <= 2
    assert loss([1] * 7, [0] * 100) == 0, "too few"
