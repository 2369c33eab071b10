"""What parts share: the clock, the guard, the worker and the rest of a session, under one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mxprobe.agent.clock import Clock
from mxprobe.agent.event_log import EventLog
from mxprobe.agent.guard import Guard
from mxprobe.agent.memory import DeviceMemory
from mxprobe.agent.part import Job
from mxprobe.agent.recorder import Recorder
from mxprobe.agent.run import Run
from mxprobe.agent.schedule import Schedule
from mxprobe.agent.transport import Transport
from mxprobe.agent.worker import Worker
from mxprobe.events import Event
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig


@dataclass(frozen=True)
class Context:
    config: AgentConfig
    transport: Transport
    clock: Clock
    schedule: Schedule
    recorder: Recorder
    events: EventLog
    guard: Guard
    worker: Worker
    memory: DeviceMemory
    run: Run
    history: WeightHistory
    """Versions of the weights; read and written by the worker alone."""

    @classmethod
    def make(cls, config: AgentConfig, transport: Transport, on_exhausted: Callable[[], None]) -> Context:
        """Make it for one attach; `on_exhausted()` is called once more errors were swallowed than are allowed."""
        clock, recorder = Clock(), Recorder(transport)
        events = EventLog(recorder, clock)
        guard = Guard(
            config.error_budget,
            lambda where, detail: events.tell(Event("error", where, text=f"{where}: {detail}")),
            on_exhausted,
            clock,
        )
        worker = events.worker = Worker(recorder, guard)
        return cls(
            config=config,
            transport=transport,
            clock=clock,
            schedule=Schedule(config.every, config.weights_every),
            recorder=recorder,
            events=events,
            guard=guard,
            worker=worker,
            memory=DeviceMemory(config.max_gpu_memory, events.tell),
            run=Run(),
            history=WeightHistory(),
        )

    def hand_over(self, job: Job) -> None:
        """Give a job to the worker; what it holds counts as memory of ours until it is over."""
        self.worker.hand_over(job, None if job.held is None else self.memory.hold(job.held))
