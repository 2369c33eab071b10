"""Run one Python statement in a live CPython 3.9 or newer, from outside. Linux on x86_64.

    python -m mxprobe.attach.injector PID START_TICKS < STATEMENT            -> one JSON object on stdout
    python -m mxprobe.attach.injector PID START_TICKS ADDRESS:BYTES ...      -> the same, once the statement has run

The main thread, and no other, is stopped for a few milliseconds: one page is mapped by single-stepping a
`syscall` instruction that is already there, the statement is written into it, `Py_AddPendingCall(
PyRun_SimpleString, page)` is called, and registers, vector state and held-back signals are put back. Nothing is
loaded, no lock of the interpreter is taken at an arbitrary instruction, and the statement itself runs later, at the
interpreter's own next safe point. So success here means *queued*; only the agent's hello means that it ran.
The interpreter reads the statement from the page (4 KiB, private, not executable) later, so it stays mapped until
the agent's hello has proved that the statement ran; the second form, a stop of the same kind, then unmaps it.

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
from mxprobe.attach.payload import BEGINNING
from mxprobe.attach.ptrace import Registers, Tracee, TraceeGone, block_signals

FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString", "Py_IsInitialized")
_SYSCALL = b"\x0f\x05"
_SYS_MMAP, _SYS_MUNMAP = 9, 11
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_NO_SYSCALL = 2**64 - 1
_RED_ZONE_BYTES = 128
_STEP_TIMEOUT_S = 5.0
_OUTSIDE_TRIES = 40
_OUTSIDE_PAUSE_S = 0.0007


class InjectError(Exception):
    """The injection failed, and the process is as it was. `reason` is the refusal's slug."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


def inject(pid: int, statement: str) -> dict[str, Any]:
    """Queue the statement. InjectError, ImageError or OSError where that fails.

    Returns {image, pause_ms, tries, page, size_bytes}: where the statement lies, to be given to `unmap` later.
    """
    maps = read_maps(pid)
    image = find_python(pid, maps, FUNCTIONS)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        gate = _syscall_instruction(memory, maps)
        tracee, standstill = _seize(pid), _Standstill()
        held_back: list[int] = []
        try:
            tries = _stop_outside(tracee, image, standstill)
            page, size_bytes = _Call(tracee, memory, gate, held_back).queue(statement, image)
        finally:
            _release(tracee, held_back)
        standstill.end()
        pause_ms = standstill.total_ms
        return {"image": image.path, "pause_ms": pause_ms, "tries": tries, "page": page, "size_bytes": size_bytes}


def unmap(pid: int, pages: list[tuple[int, int]]) -> dict[str, Any]:
    """Unmap (address, size in bytes) of statements that have run. Returns {pause_ms, unmapped: [address, ...]}.

    What no longer holds a statement of ours (the process has replaced itself) is not touched.
    """
    ours = statements_among(pid, pages)
    if not ours:
        return {"pause_ms": 0.0, "unmapped": []}
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        gate = _syscall_instruction(memory, read_maps(pid))
        tracee, standstill = _seize(pid), _Standstill()
        held_back: list[int] = []
        try:
            standstill.begin()
            _stop(tracee)
            _Call(tracee, memory, gate, held_back).unmap(ours)
        finally:
            _release(tracee, held_back)
        standstill.end()
        return {"pause_ms": standstill.total_ms, "unmapped": [address for address, _ in ours]}


def statements_among(pid: int, pages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pages that hold a statement of ours. OSError where the process shows no memory."""
    beginning = BEGINNING.encode()

    def holds(memory: BinaryIO, address: int) -> bool:
        try:
            return os.pread(memory.fileno(), len(beginning), address) == beginning
        except (OSError, OverflowError):
            return False

    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return [page for page in pages if holds(memory, page[0])]


class _Standstill:
    """The time for which the thread stands still, at most: from asking it to stop until it has been let go."""

    def __init__(self) -> None:
        self.total_ms = 0.0
        self._since = 0.0

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self) -> None:
        self.total_ms += (time.perf_counter() - self._since) * 1e3


class _Call:
    """Calls made by the stopped thread on our behalf, and the state that is put back afterwards."""

    def __init__(self, tracee: Tracee, memory: BinaryIO, gate: int, held_back: list[int]) -> None:
        self._tracee = tracee
        self._memory = memory
        self._gate = gate
        self._held_back = held_back
        self._saved = tracee.registers()
        tracee.save_xstate()

    def queue(self, statement: str, image: PythonImage) -> tuple[int, int]:
        """Queue the statement; returns address and size in bytes of the mapping that holds it."""
        text = statement.encode() + b"\0"
        size_bytes = -(-len(text) // PAGE_BYTES) * PAGE_BYTES
        with self._put_back():
            if not self._function(image.addresses["Py_IsInitialized"]):
                raise InjectError("not_ready")
            page = self._map(size_bytes)
            self._memory.seek(page)
            self._memory.write(text)
            if self._function(image.addresses["Py_AddPendingCall"], image.addresses["PyRun_SimpleString"], page):
                self._system_call(_SYS_MUNMAP, page, size_bytes)
                raise InjectError("injection_failed", "the interpreter's queue of pending calls is full")
        return page, size_bytes

    def unmap(self, pages: list[tuple[int, int]]) -> None:
        with self._put_back():
            for address, size_bytes in pages:
                self._system_call(_SYS_MUNMAP, address, size_bytes)

    @contextlib.contextmanager
    def _put_back(self) -> Generator[None]:
        try:
            yield
        finally:
            self._tracee.restore_xstate()
            self._tracee.set_registers(self._saved)

    def _map(self, size_bytes: int) -> int:
        return self._system_call(
            _SYS_MMAP, 0, size_bytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, 2**64 - 1, 0, what="mmap"
        )

    def _system_call(self, number: int, *arguments: int, what: str = "munmap") -> int:
        """Make a system call by stepping over an instruction that is there already; it takes no lock of anybody's."""
        registers = self._saved.copy()
        registers.rip, registers.rax, registers.orig_rax = self._gate, number, _NO_SYSCALL
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(registers, name, value)
        result = self._run(registers, signal.SIGTRAP, single_step=True).rax
        if result > 2**64 - PAGE_BYTES:
            raise InjectError("injection_failed", f"{what}: {os.strerror(2**64 - result)}")
        return result

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


def _stop(tracee: Tracee) -> None:
    """Stop the thread wherever it is."""
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


def _stop_outside(tracee: Tracee, image: PythonImage, standstill: _Standstill) -> int:
    """Stop the thread, preferably where it is not in the interpreter's own code; returns how often that was tried.

    The interpreter might hold the lock of its pending calls there. A thread in pure Python is nearly always in it,
    so after a while any place is taken: the lock is held for nanoseconds, and only while calls are pending.
    """
    tries = 0
    while True:
        standstill.begin()
        _stop(tracee)
        tries += 1
        if tries >= _OUTSIDE_TRIES or not image.holds(tracee.registers().rip):
            return tries
        tracee.resume()
        standstill.end()
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
    pages = [(int(address), int(size)) for address, _, size in (word.partition(":") for word in sys.argv[3:])]
    statement = "" if pages else sys.stdin.read()
    gc.disable()
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        if int(fields[19]) != start_ticks:
            raise InjectError("exited", "its PID now belongs to another process")
        answer = unmap(pid, pages) if pages else inject(pid, statement)
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
