"""Run one Python statement in a live CPython 3.9 or newer, from outside. Linux on x86_64.

    python -m mxprobe.attach.injector PID START_TICKS < STATEMENT      -> one JSON object on stdout

The main thread, and no other, is stopped for a few milliseconds: one page is mapped by single-stepping a
`syscall` instruction that is already there, the statement is written into it, `Py_AddPendingCall(
PyRun_SimpleString, page)` is called, and registers, vector state and held-back signals are put back. Nothing is
loaded, no lock of the interpreter is taken at an arbitrary instruction, and the statement itself runs later, at the
interpreter's own next safe point. So success here means *queued*; only the agent's hello means that it ran.
The page (4 KiB, private, not executable) stays mapped: the interpreter reads the statement from it later.

A process of its own, with signals blocked and outside the caller's session: dying between the two register writes
(about a millisecond) would end the traced process. CPython's eval loop turns a pending call that fails
into a SystemError in the user's frame; hence the statement must swallow everything (`mxprobe.attach.payload`).
"""

import contextlib
import errno
import gc
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

from mxprobe.attach.elf import PAGE_BYTES, ImageError, Mapping, PythonImage, find_python, read_maps
from mxprobe.attach.ptrace import Registers, Tracee, TraceeGone, block_signals

FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString", "Py_IsInitialized")
_SYSCALL = b"\x0f\x05"
_SYS_MMAP = 9
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_NO_SYSCALL = 2**64 - 1
_RED_ZONE_BYTES = 128
_STEP_TIMEOUT_S = 5.0
_OUTSIDE_TRIES = 40
_OUTSIDE_PAUSE_S = 0.0007


class InjectError(Exception):
    """`reason` is the refusal's slug; the process is as it was."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


def inject(pid: int, statement: str) -> dict[str, Any]:
    """Queue the statement. Returns {image, pause_ms, tries}; InjectError, ImageError or OSError otherwise."""
    maps = read_maps(pid)
    image = find_python(pid, maps, FUNCTIONS)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        gate = _syscall_instruction(memory, maps)
        tracee = _seize(pid)
        started = time.perf_counter()
        held_back: list[int] = []
        try:
            tries = _stop_outside(tracee, image)
            _Call(tracee, memory, held_back).queue(statement, image, gate)
        finally:
            _release(tracee, held_back)
        return {"image": image.path, "pause_ms": (time.perf_counter() - started) * 1e3, "tries": tries}


class _Call:
    """Calls made by the stopped thread on our behalf, and the state that is put back afterwards."""

    def __init__(self, tracee: Tracee, memory: BinaryIO, held_back: list[int]) -> None:
        self._tracee = tracee
        self._memory = memory
        self._held_back = held_back
        self._saved = tracee.registers()
        tracee.save_xstate()

    def queue(self, statement: str, image: PythonImage, gate: int) -> None:
        text = statement.encode() + b"\0"
        with self._put_back():
            if not self._function(image.addresses["Py_IsInitialized"]):
                raise InjectError("not_ready")
            page = self._map(gate, -(-len(text) // PAGE_BYTES) * PAGE_BYTES)
            self._memory.seek(page)
            self._memory.write(text)
            if self._function(image.addresses["Py_AddPendingCall"], image.addresses["PyRun_SimpleString"], page):
                raise InjectError("injection_failed", "the interpreter's queue of pending calls is full")

    @contextlib.contextmanager
    def _put_back(self) -> Generator[None]:
        try:
            yield
        finally:
            self._tracee.restore_xstate()
            self._tracee.set_registers(self._saved)

    def _map(self, gate: int, size_bytes: int) -> int:
        registers = self._saved.copy()
        registers.rip, registers.rax, registers.orig_rax = gate, _SYS_MMAP, _NO_SYSCALL
        registers.rdi, registers.rsi, registers.rdx = 0, size_bytes, _PROT_READ_WRITE
        registers.r10, registers.r8, registers.r9 = _MAP_PRIVATE_ANONYMOUS, 2**64 - 1, 0
        page = self._run(registers, signal.SIGTRAP, single_step=True).rax
        if page > 2**63:
            raise InjectError("injection_failed", f"mmap: {os.strerror(2**64 - page)}")
        return page

    def _function(self, address: int, first: int = 0, second: int = 0) -> int:
        """Call an int function. It returns to address 0, whose fault hands the thread back to us."""
        registers = self._saved.copy()
        stack = ((self._saved.rsp - _RED_ZONE_BYTES - 256) & ~15) - 8
        self._memory.seek(stack)
        self._memory.write(struct.pack("<Q", 0))
        registers.rip, registers.rsp, registers.rax, registers.orig_rax = address, stack, 0, _NO_SYSCALL
        registers.rdi, registers.rsi = first, second
        result = self._run(registers, signal.SIGSEGV, single_step=False)
        if result.rip != 0:
            raise InjectError("injection_failed", f"the call faulted at {result.rip:#x}")
        return result.rax & 0xFFFFFFFF

    def _run(self, registers: Registers, until: int, *, single_step: bool) -> Registers:
        tracee = self._tracee
        tracee.set_registers(registers)
        tracee.resume(single_step=single_step)
        interrupted = False
        while True:
            stop = tracee.wait(_STEP_TIMEOUT_S)
            if stop is None:
                if interrupted:
                    raise InjectError("injection_failed", "the thread cannot be stopped again")
                # Stop it wherever it is, so that the registers can be put back: it never comes to need the result.
                interrupted = True
                tracee.interrupt()
                continue
            if stop.signal == until and not stop.is_event:
                return tracee.registers()
            if interrupted and stop.is_event:
                raise InjectError("injection_failed", "the call did not return")
            if not stop.is_event:
                self._held_back.append(stop.signal)
            tracee.resume(single_step=single_step)


def _seize(pid: int) -> Tracee:
    try:
        return Tracee(pid)
    except OSError as error:
        raise InjectError("exited" if error.errno == errno.ESRCH else "not_permitted", str(error)) from None


def _stop_outside(tracee: Tracee, image: PythonImage) -> int:
    """Stop the thread, preferably where it is not in the interpreter's own code; returns how often that was tried.

    The interpreter might hold the lock of its pending calls there. A thread in pure Python is nearly always in it,
    so after a while any place is taken: the lock is held for nanoseconds, and only while calls are pending.
    """
    tries = 0
    while True:
        tracee.interrupt()
        while True:
            stop = tracee.wait(_STEP_TIMEOUT_S)
            if stop is None:
                raise InjectError("not_stoppable", "no stop within 5 s")
            if stop.is_event:
                break
            tracee.resume(stop.signal)  # a signal for the user's handler came first: deliver it
        if stop.signal != signal.SIGTRAP:
            raise InjectError("stopped")
        tries += 1
        if tries >= _OUTSIDE_TRIES or not image.holds(tracee.registers().rip):
            return tries
        tracee.resume()
        time.sleep(_OUTSIDE_PAUSE_S)


def _release(tracee: Tracee, held_back: list[int]) -> None:
    """Let go, and deliver what arrived meanwhile. Linux lets go by itself if the thread is not stopped or gone."""
    with contextlib.suppress(OSError):
        for number in held_back[:-1]:
            os.kill(tracee.tid, number)
        tracee.detach(held_back[-1] if held_back else 0)


def _syscall_instruction(memory: BinaryIO, maps: list[Mapping]) -> int:
    for mapping in maps:
        in_libc = "/libc.so" in mapping.path or "/libc-" in mapping.path or "/ld-musl" in mapping.path
        if "x" in mapping.permissions and (mapping.path == "[vdso]" or in_libc):
            memory.seek(mapping.start)
            at = memory.read(mapping.end - mapping.start).find(_SYSCALL)
            if at >= 0:
                return mapping.start + at
    raise InjectError("injection_failed", "no system call instruction in libc or the vdso")


def main() -> int:
    block_signals()
    with contextlib.suppress(OSError):
        os.nice(-10)  # where allowed: on a busy machine the stopped thread waits for us to be scheduled
    pid, start_ticks = int(sys.argv[1]), int(sys.argv[2])
    statement = sys.stdin.read()
    gc.disable()
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        if int(fields[19]) != start_ticks:
            raise InjectError("exited", "its PID now belongs to another process")
        answer = inject(pid, statement)
    except (InjectError, ImageError) as error:
        answer = {"reason": error.reason, "detail": error.detail}
    except (FileNotFoundError, ProcessLookupError, TraceeGone):
        answer = {"reason": "exited", "detail": "during the injection"}
    except PermissionError as error:
        answer = {"reason": "not_permitted", "detail": str(error)}
    except OSError as error:
        answer = {"reason": "injection_failed", "detail": str(error)}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
