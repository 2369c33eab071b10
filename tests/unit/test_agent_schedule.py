from __future__ import annotations

from collections.abc import Set

from mxprobe.agent.clock import Clock
from mxprobe.agent.schedule import Schedule


def run(
    schedule: Schedule,
    n: int,
    *,
    aligned_at: int = 0,
    base: int = 0,
    busy: Set[int] = frozenset(),
    generates: Set[int] = frozenset(),
) -> str:
    """One letter per step: W probed with weights, P probed, o outputs only, . nothing."""
    clock, letters = Clock(), ""
    for step in range(1, n + 1):
        if step == aligned_at:
            schedule.align(base)
        schedule.plan(clock, busy=step in busy)
        letters += "W" if clock.with_weights else "P" if clock.probed else "o" if clock.only_outputs else "."
        watched = clock.probed or clock.only_outputs
        clock.generated = watched and step in generates
        schedule.close(clock)
        clock.next()
    return letters


def test_the_first_step_and_every_nth_are_probed_and_weights_less_often():
    assert run(Schedule(3, 6), 14, generates=set(range(20))) == "W..P..W..P..W."


def test_a_step_that_is_due_while_measuring_is_put_off():
    assert run(Schedule(4, 100), 13, busy={5, 6}, generates=set(range(20))) == "W.....P.P...P"


def test_a_generation_that_was_missed_is_looked_for_in_the_steps_after():
    assert run(Schedule(6, 100), 12, generates={3, 4, 8}) == "Woo...Po...."


def test_a_run_that_never_generates_is_looked_at_once():
    assert run(Schedule(4, 100), 12) == "WoooP...P..."


def test_ranks_that_were_attached_at_different_steps_probe_the_same_ones():
    every = set(range(40))
    late, early = (
        run(Schedule(4, 8), 24 - base, aligned_at=at, base=base, generates=every) for base, at in ((2, 1), (0, 2))
    )
    assert early == "W..P...W...P...W...P...W"
    assert ".." + late == "..WP...W...P...W...P...W"  # its first step is its first probe


def test_a_count_that_is_known_late_moves_the_next_probe_to_the_shared_one():
    assert run(Schedule(5, 100), 16, aligned_at=4, base=101, generates=set(range(40))) == "W..P....P....P.."
    assert run(Schedule(5, 100), 16, aligned_at=12, base=101, generates=set(range(40))) == "W....P....P..P.."


def test_a_probe_that_was_put_off_does_not_shift_those_to_come():
    assert run(Schedule(4, 100), 17, aligned_at=1, base=0, busy={8, 9}, generates=set(range(40))) == "W..P.....P.P...P."
