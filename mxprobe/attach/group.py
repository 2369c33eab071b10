"""Several processes attached side by side into one trace. Each has a controller in a thread; none waits for another.

One process is a group of one. A process that cannot be attached is reported and does not stop the others.
"""

import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mxprobe.attach.controller import AttachOutcome, Controller
from mxprobe.attach.process import Process
from mxprobe.attach.progress import Progress
from mxprobe.attach.refusals import refuse
from mxprobe.attach.trace_recorder import RunTrace, check_free
from mxprobe.errors import AttachError, MxprobeError
from mxprobe.protocol import AgentConfig
from mxprobe.trace import Retention

_RETRY_EVERY_S = 1.0
_JOIN_S = 0.2
_BESIDE_PATIENCE_S = 5.0
_NOT_MEANT = frozenset({"no_torch", "no_step", "no_model"})
_WORTH_WAITING_FOR = frozenset({"no_torch", "not_ready"})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class AttachOptions:
    """What `mxprobe attach` was asked for."""

    directory: Path
    config: AgentConfig = field(default_factory=AgentConfig)
    duration_s: float | None = None
    """Leave after so many seconds; None means until told to."""
    retention: Retention = field(default_factory=Retention)
    copy_to: str | None = None
    """URL that the trace is copied to while it is written."""
    wait_s: float = 0.0
    """Keep trying for so many seconds while a process has not yet imported torch."""
    via: str | None = None
    """The only way in to use; None means the first that is open."""
    command_line: Sequence[str] = ()
    job: Mapping[str, Any] | None = None
    """What the processes have in common, for `run.json`."""
    perhaps: frozenset[int] = frozenset()
    """PIDs of processes that are left out in silence where they neither train nor log."""
    beside: frozenset[int] = frozenset()
    """PIDs of processes that belong to the job and are no rank of it."""

    def config_of(self, pid: int) -> AgentConfig:
        if pid not in self.beside:
            return self.config
        return replace(self.config, step_timeout_s=min(self.config.step_timeout_s, _BESIDE_PATIENCE_S))


@dataclass
class _Member:
    process: Process
    shown_name: str
    """Empty where there is no other to be told from."""
    controller: Controller | None = None
    settled: bool = False
    """Attached or refused for good."""
    outcome: AttachOutcome | None = None
    error: MxprobeError | None = None


class Group:
    """`run` attaches to all, records, and returns when the last has ended. Call it in the main thread.

    Args:
        processes: name (`rank 3`) -> process. The names are used only where there are several.
        options: what to do.
        progress: shows what happens.
        on_attached: called once, when every process is attached or refused, if one is attached.
    """

    def __init__(
        self,
        processes: Mapping[str, Process],
        options: AttachOptions,
        progress: Progress,
        *,
        on_attached: Callable[[], None] = lambda: None,
    ) -> None:
        several = len(processes) > 1
        self._members = [_Member(process, name if several else "") for name, process in processes.items()]
        self._options = options
        self._progress = progress
        self._on_attached = on_attached
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> list[AttachOutcome]:
        """Return how each attached process ended. AttachError if none was; TraceError if the disk refused."""
        options = self._options
        check_free(options.directory)
        facts: dict[str, Any] = {"command_line": list(options.command_line)}
        if options.job is not None:
            facts["job"] = dict(options.job)
        trace = RunTrace(
            options.directory,
            [member.process.pid for member in self._members],
            facts,
            beside=options.beside,
            retention=options.retention,
            copy_to=options.copy_to,
        )
        with signals_handled(self._interrupt), ThreadPoolExecutor(len(self._members), "attach") as pool:
            pending = [pool.submit(self._serve, member, trace) for member in self._members]
            while wait(pending, _JOIN_S).not_done:
                pass  # a wait without end would keep Python from running signal handlers
        self._progress.close()
        return self._result()

    def _serve(self, member: _Member, trace: RunTrace) -> None:
        try:
            member.outcome = self._attach_patiently(member, trace)
        except MxprobeError as error:
            member.error = error
        except Exception as error:
            member.error = MxprobeError(
                f"The controller of process {member.process.pid} failed: {type(error).__name__}: {error}",
                cause="a defect in mxprobe; the agent leaves the process by itself",
                remedy="report it with the output of `mxprobe doctor`",
            )
        if member.error is not None:
            reason = getattr(member.error, "reason", "failed")
            with suppress(MxprobeError):  # of a trace that takes no more, which is the error itself or soon will be
                trace.refuse(member.process.pid, reason=reason, what=member.error.what)
            if member.shown_name and (member.process.pid not in self._options.perhaps or reason not in _NOT_MEANT):
                self._progress.say(str(member.error), member.shown_name)
        self._settle(member)
        self._progress.forget(member.shown_name)

    def _attach_patiently(self, member: _Member, trace: RunTrace) -> AttachOutcome:
        options, process = self._options, member.process
        deadline = time.monotonic() + (0.0 if process.pid in options.beside else options.wait_s)
        while not self._stop.is_set():
            controller = Controller(
                process,
                options.config_of(process.pid),
                trace,
                self._progress,
                name=member.shown_name,
                duration_s=options.duration_s,
                via=options.via,
                on_attached=lambda: self._settle(member),
                on_jump=self._trigger_all if options.config.record else None,
            )
            member.controller = controller
            if self._stop.is_set():
                controller.interrupt()
            try:
                return controller.run()
            except AttachError as error:
                if error.reason not in _WORTH_WAITING_FOR or time.monotonic() >= deadline:
                    raise
            self._progress.show(f"waiting for process {process.pid} to import torch", member.shown_name)
            self._stop.wait(_RETRY_EVERY_S)
        raise refuse("interrupted", process.pid)

    def _settle(self, member: _Member) -> None:
        with self._lock:
            is_last = not member.settled and all(m.settled or m is member for m in self._members)
            member.settled = True
            attached = any(m.error is None for m in self._members)
        if is_last and attached:
            self._on_attached()

    def _result(self) -> list[AttachOutcome]:
        for member in self._members:
            if member.error is not None and (not isinstance(member.error, AttachError) or len(self._members) == 1):
                raise member.error
        outcomes = [member.outcome for member in self._members if member.outcome is not None]
        if not outcomes:
            raise AttachError(
                "none_attached",
                f"None of the {len(self._members)} processes could be attached.",
                cause="see the reason given for each",
                remedy="`mxprobe doctor` says which ways in work here",
            )
        return outcomes

    def _trigger_all(self, reason: str) -> None:
        """Trigger all members: the process that logs may not be one that trains."""
        for controller in self._controllers():
            controller.trigger(reason)

    def _interrupt(self) -> None:
        self._stop.set()
        for controller in self._controllers():
            controller.interrupt()

    def _controllers(self) -> list[Controller]:
        return [member.controller for member in self._members if member.controller is not None]


@contextmanager
def signals_handled(end: Callable[[], None]) -> Generator[None]:
    """Have a signal call `end`, which ends every attachment in order; then put the handlers back."""
    before = {number: signal.signal(number, lambda *_: end()) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
