"""One attachment from outside: get the agent in, record what it sends, get it out again, leave a closed trace.

An event or its timeout ends each phase: *entering* (until the agent's hello), *observing* (until it has seen a step and
is attached), *recording*, *leaving*. Before *recording*, whatever goes wrong is a refusal. After that, the trace is
closed properly whatever happens.
"""

import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxprobe.attach import server
from mxprobe.attach.agent_link import AgentLink
from mxprobe.attach.archive import write_archive
from mxprobe.attach.entry import Entry, enter, unmap
from mxprobe.attach.process import Liveness, Process, check_attachable, main_thread_activity
from mxprobe.attach.progress import Progress
from mxprobe.attach.refusals import refuse
from mxprobe.attach.rundir import RunDirectory
from mxprobe.attach.trace_recorder import RunTrace, TraceRecorder
from mxprobe.attach.waiting_clients import WaitingClients, not_switched
from mxprobe.errors import AttachError, MxprobeError, TraceError
from mxprobe.protocol import AgentConfig, Frame

_TICK_S = 0.25
_OBSERVE_MARGIN_S = 15.0
_LEAVE_TIMEOUT_S = 60.0
_GOODBYE_S = 5.0


@dataclass(frozen=True)
class AttachOutcome:
    """How an attachment ended. `reason` is `detached`, `interrupted`, `duration`, `target_exited`, `agent_lost`, or the
    agent's own."""

    reason: str
    directory: Path
    n_rows: int
    steps: int | None
    name: str
    """The process's name among those of a group."""


class Controller:
    """`run` does all of it in the calling thread. Any other thread may call `interrupt`, which ends it in order.

    Args:
        process: the process to attach to.
        config: what the agent is to do.
        trace: takes its rows, and stays open.
        progress: is told what happens.
        name: the process's name in `progress`; empty where there is no other process.
        duration_s: leave after so many seconds; None means until told to.
        via: the only way in to use; None means the first that is open.
        on_attached: called when recording begins.
        on_jump: called with words when a logged mismatch jumps, in a thread of ours; None means that nobody looks.
    """

    def __init__(
        self,
        process: Process,
        config: AgentConfig,
        trace: RunTrace,
        progress: Progress,
        *,
        name: str = "",
        duration_s: float | None = None,
        via: str | None = None,
        on_attached: Callable[[], None] = lambda: None,
        on_jump: Callable[[str], None] | None = None,
    ) -> None:
        self._process = process
        self._config = config
        self._directory = trace.directory
        self._duration_s = duration_s
        self._via = via
        self._progress = progress
        self._name = name
        self._on_attached = on_attached
        self._events: queue.SimpleQueue[server.Event] = queue.SimpleQueue()
        self._recorder = TraceRecorder(trace, process.pid, on_jump)
        self._phase = "entering"
        self._entry: Entry | None = None
        self._pause: dict[str, float] = {}
        self._clearing: threading.Thread | None = None
        self._agent = AgentLink()
        self._liveness = Liveness(process)
        self._ending: str | None = None
        self._hurry = False
        self._error: MxprobeError | None = None
        self._clients = WaitingClients(self.status)
        self._started_ns = 0

    def run(self) -> AttachOutcome:
        """Attach, record, detach. AttachError if it did not come to recording; TraceError if the disk refused."""
        check_attachable(self._process)
        with ExitStack() as last_first:  # a disk that refuses the end of the trace keeps nothing else from its end
            run_directory = RunDirectory.create(self._process)
            last_first.callback(run_directory.close)
            token, pid = secrets.token_hex(16), self._process.pid
            control = server.ControlServer(
                run_directory.control_socket, token=token, pid=pid, events=self._events, on_batch=self._recorder.write
            )
            for end in (control.close, self._agent.close, self._answer_the_end, self._end_trace, self._await_clearing):
                last_first.callback(end)
            try:
                self._get_in(run_directory, token)
                self._observe(run_directory)
            except AttachError:
                self._let_go()
                raise
            self._record()
            self._leave()
            return self._finish()

    def interrupt(self) -> None:
        """Leave at the next step. A second call makes it leave at once."""
        self._events.put(server.Interrupted())

    def trigger(self, reason: str) -> None:
        """Have the agent keep its past and go to full statistics. Any thread may call this."""
        self._events.put(server.TriggerWanted(reason))

    # Phases

    def _get_in(self, run_directory: RunDirectory, token: str) -> None:
        pid, patience_s = self._process.pid, self._config.step_timeout_s
        try:
            write_archive(run_directory.archive)
        except OSError as error:
            raise refuse("no_room", pid, f"{run_directory.path}: {error.strerror or error}") from None
        started = time.monotonic()
        entry = self._entry = enter(self._process, run_directory, token, via=self._via)

        def say_queued() -> None:
            if time.monotonic() - started > 1.0:
                self._show(f"queued: the main thread of {pid} is {main_thread_activity(pid)}")

        if not self._until(lambda: self._agent.is_here, patience_s, say_queued):
            raise refuse("no_ack", pid, main_thread_activity(pid), seconds=patience_s)
        self._pause = {"pause_ms": entry.pause_ms, "attach_latency_ms": (time.monotonic() - started) * 1e3}
        self._recorder.update_run(mechanism=entry.mechanism, **self._pause)

    def _observe(self, run_directory: RunDirectory) -> None:
        self._phase = "observing"
        pid, config = self._process.pid, self._config
        self._agent.say({"verb": "attach", "config": config.to_json()})
        self._clearing = threading.Thread(target=self._clear_statement, args=(run_directory,), daemon=True)
        self._clearing.start()  # not here: the agent is to hear pings meanwhile
        event = "its next optimizer step or generation" if self._agent.hello.get("torch") else "it to import torch"
        waiting = f"process {pid} has the agent; waiting for {event}"
        # The agent waits for torch, for a step, then for generation.
        patience_s = config.torch_wait_s + 2 * config.step_timeout_s + _OBSERVE_MARGIN_S
        if not self._until(lambda: self._agent.attached is not None, patience_s, lambda: self._show(waiting)):
            raise refuse("no_step", pid, seconds=config.step_timeout_s)

    def _clear_statement(self, run_directory: RunDirectory) -> None:
        """Unmap statements. The agent's hello proves that ours ran, and with it all that were queued before."""
        run_directory.script.unlink(missing_ok=True)
        if self._entry is None or not self._entry.leaves_page:
            return
        pages = run_directory.page_record.pages()
        try:
            answer = unmap(self._entry, self._process, run_directory, pages)
        except (AttachError, subprocess.SubprocessError, OSError):
            return  # on record: the next attach does it
        run_directory.page_record.discard(pages)
        self._recorder.update_run(unmap_pause_ms=answer["pause_ms"])

    def _record(self) -> None:
        self._phase = "recording"
        process = self._process
        self._started_ns = time.time_ns()
        hello = {key: value for key, value in self._agent.hello.items() if key not in ("verb", "token", "argv")}
        self._recorder.update_run(
            target={**hello, "pid": process.pid, "cmdline": list(process.command_line)},
            config=self._config.to_json(),
            started_ns=self._started_ns,
            **self._agent.place,
        )
        self._recorder.open()
        self._progress.say(
            f"attached to {process.pid} ({process.name}) by {self._mechanism}"
            f", role {(self._agent.attached or {}).get('role', 'unknown')}; writing {self._directory}",
            self._name,
        )
        self._on_attached()
        self._until(lambda: self._ending is not None, self._duration_s, self._show_recording)
        self._ending = self._ending or "duration"

    def _leave(self) -> None:
        self._phase = "leaving"
        if not self._agent.is_out:
            self._agent.say({"verb": "detach"})
            self._show("detaching at the next step")
            self._until(lambda: self._agent.is_out, _LEAVE_TIMEOUT_S)
        if self._agent.detached is not None:
            self._until(lambda: not self._agent.is_here, _GOODBYE_S)

    def _let_go(self) -> None:
        """Have the agent of a refused attach leave now, not when its lease runs out."""
        self._phase = "leaving"
        if self._agent.is_here:
            self._agent.say({"verb": "detach"})
            self._until(lambda: self._agent.is_out, _GOODBYE_S)

    def _await_clearing(self) -> None:
        if self._clearing is not None:
            self._clearing.join()

    def _finish(self) -> AttachOutcome:
        self._await_clearing()
        detached = {key: value for key, value in (self._agent.detached or {}).items() if key != "verb"}
        reason = self._ending or "detached"
        try:
            self._recorder.update_run(agent={**self._agent.status, **detached})
            self._recorder.end(reason)
        except TraceError as error:
            self._error = self._error or error  # the first says what happened
        if self._error is not None:
            raise self._error
        return AttachOutcome(reason, self._directory, self._recorder.n_rows, detached.get("steps"), self._name)

    def _end_trace(self) -> None:
        try:
            self._recorder.end(self._ending or "failed")
        except TraceError:
            if self._error is None:
                raise

    # Events

    def _until(
        self, done: Callable[[], bool], timeout_s: float | None, tick: Callable[[], None] = lambda: None
    ) -> bool:
        """Handle events until `done`; False after the timeout. An end that comes before recording is raised."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            now = time.monotonic()
            if self._hurry or (deadline is not None and now >= deadline):
                return False
            wait_s = _TICK_S if deadline is None else min(_TICK_S, deadline - now)
            with suppress(queue.Empty):
                self._handle(self._events.get(timeout=wait_s))
            self._check_target()
            self._keep_in_touch()
            if self._phase in ("entering", "observing") and self._ending is not None:
                raise self._refusal_before_recording()
            tick()
        return True

    def _handle(self, event: server.Event) -> None:
        match event:
            case server.AgentHello(agent, frame):
                self._agent.arrive(agent, frame)
                self._recorder.claim_rank(self._agent.rank)
            case server.AgentSaid(frame):
                self._hear(frame)
            case server.AgentGone(detail):
                self._agent.leave()
                if self._agent.detached is None:
                    self._end("agent_lost" if self._liveness.lives_on() else "target_exited", detail)
            case server.WriteFailed(error):
                self._error = error
                self._agent.leave()  # its connection ends with the writer: there is nothing to wait for
                self._end("write_failed", str(error))
            case server.ClientAsked(client, frame):
                self._serve_client(client, frame)
            case server.TriggerWanted(reason):
                if self._phase == "recording":
                    self._agent.say({"verb": "trigger", "reason": reason})
            case server.Interrupted():
                self._hurry = self._ending is not None and self._phase == "leaving"
                self._end("interrupted", "")

    def _hear(self, frame: Frame) -> None:
        match frame["verb"]:
            case "attached":
                again, self._agent.attached = self._agent.attached is not None, frame
                if again:  # a process that only logged has taken a step
                    self._recorder.update_run(**self._agent.place)
            case "status":
                self._agent.status = {key: value for key, value in frame.items() if key != "verb"}
                self._clients.answer_status(everyone=True)
            case "set":
                self._clients.answer_switch(frame)
            case "detached":
                self._agent.detached = frame
                self._end(str(frame.get("reason") or "agent_left"), "")
            case "failed":
                self._end(str(frame.get("reason")), str(frame.get("detail", "")))
            case _:
                pass  # a verb for the other direction: nothing to do

    def _end(self, reason: str, detail: str) -> None:
        if self._ending is None:
            self._ending, self._ending_detail = reason, detail

    def _refusal_before_recording(self) -> MxprobeError:
        if self._error is not None:
            return self._error
        reason, detail = self._ending or "", self._ending_detail
        if reason == "target_exited":
            reason, detail = "exited", "while it was being attached"
        elif reason == "detached":
            reason = "interrupted"
        return refuse(reason, self._process.pid, detail, seconds=self._config.step_timeout_s)

    def _check_target(self) -> None:
        if (self._agent.is_here or self._phase == "entering") and self._liveness.is_long_dead():
            self._agent.leave()
            self._end("target_exited", "")

    def _keep_in_touch(self) -> None:
        if self._phase != "entering":  # the agent's first frame is attach
            self._agent.keep_in_touch(ask_status=self._phase == "recording")
        self._clients.answer_status(everyone=False)

    # Clients

    def _serve_client(self, client: server.Peer, frame: Frame) -> None:
        recording = self._phase == "recording" and self._agent.is_here
        match frame["verb"], recording:
            case "detach", _:
                self._clients.wait_for_end(client)
                self._end("detached", "")
            case "trigger", _:
                if recording:
                    self._agent.say({"verb": "trigger", "reason": "mxprobe trigger"})
                client.send({"verb": "triggered", "recording": recording, "past": recording and self._config.record})
            case "set", True:
                self._agent.say({**frame, "id": self._clients.wait_for_switch(client)})
            case "set", False:
                client.send(not_switched("not_recording", f"the attach is {self._phase}"))
            case _:
                self._clients.wait_for_status(client)
                if recording:
                    self._agent.say({"verb": "status"})
                else:
                    self._clients.answer_status(everyone=True)

    def _answer_the_end(self) -> None:
        detached = self._agent.detached or {}
        self._clients.answer_the_end(
            {
                "reason": self._ending,
                "directory": str(self._directory.absolute()),
                "n_rows": self._recorder.n_rows,
                "steps": detached.get("steps"),
                "recorded": self._started_ns > 0,
                "recipes": detached.get("recipes"),
            }
        )

    def status(self) -> dict[str, Any]:
        """Return what `mxprobe status` shows. `agent` is what the agent last told of itself."""
        return {
            "pid": self._process.pid,
            "rank": self._recorder.rank,
            "name": self._process.name,
            "phase": self._phase,
            "mechanism": self._mechanism,
            "role": (self._agent.attached or {}).get("role"),
            "directory": str(self._directory.absolute()),
            "attached_s": (time.time_ns() - self._started_ns) / 1e9 if self._started_ns else None,
            "last_step": self._recorder.last_step,
            **self._pause,
            "n_batches": self._recorder.n_batches,
            "n_rows": self._recorder.n_rows,
            "lost_ranks": self._recorder.trace.lost,
            "agent": self._agent.status,
        }

    @property
    def _mechanism(self) -> str | None:
        return self._entry.mechanism if self._entry else None

    def _show_recording(self) -> None:
        seconds = (time.time_ns() - self._started_ns) / 1e9
        step = "" if self._recorder.last_step is None else f" · step {self._recorder.last_step}"
        self._show(f"recording {self._process.pid}{step} · {self._recorder.n_rows} rows · {seconds:.0f} s")

    def _show(self, text: str) -> None:
        self._progress.show(text, self._name)
