"""ptrace(2) on x86_64 Linux: registers, extended state, stops; only what the injector needs."""

import ctypes
import os
import signal
import time

_SINGLESTEP, _CONT, _GETREGS, _SETREGS, _DETACH = 9, 7, 12, 13, 17
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
_NT_X86_XSTATE = 0x202
_WALL = 0x40000000
_XSTATE_BYTES = 65536
_POLL_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long

# In the kernel's order.
_REGISTER_NAMES = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
)


class Registers(ctypes.Structure):
    """`struct user_regs_struct`. Attributes are unsigned 64-bit integers."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in _REGISTER_NAMES.split()]
    rip: int
    rsp: int
    rax: int
    orig_rax: int
    rdi: int
    rsi: int
    rdx: int
    r10: int
    r8: int
    r9: int

    def copy(self) -> "Registers":
        return Registers.from_buffer_copy(self)


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    length: int


class TraceeGone(Exception):  # noqa: N818  (a state, not a mistake)
    """The thread ended while it was traced."""


class Stop:
    """How the thread stopped: a signal about to be delivered, or (`is_event`) a stop of ptrace's own."""

    def __init__(self, status: int) -> None:
        self.signal = os.WSTOPSIG(status)
        self.is_event = status >> 16 != 0


class Tracee:
    """One seized thread. Between `interrupt` and `detach` it is stopped except while a method lets it run."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._xstate = ctypes.create_string_buffer(_XSTATE_BYTES)
        _call(_SEIZE, tid)

    def interrupt(self) -> None:
        _call(_INTERRUPT, self.tid)

    def resume(self, signal_number: int = 0, *, single_step: bool = False) -> None:
        _call(_SINGLESTEP if single_step else _CONT, self.tid, 0, signal_number)

    def detach(self, signal_number: int = 0) -> None:
        _call(_DETACH, self.tid, 0, signal_number)

    def wait(self, timeout_s: float) -> Stop | None:
        """Return the next stop, or None after the timeout. TraceeGone if the thread ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            pid, status = os.waitpid(self.tid, os.WNOHANG | _WALL)
            if pid:
                if not os.WIFSTOPPED(status):
                    raise TraceeGone
                return Stop(status)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            # A stop raises SIGCHLD here: woken at once rather than by polling, the thread stands still for less.
            signal.sigtimedwait([signal.SIGCHLD], min(left_s, _POLL_S))

    def registers(self) -> Registers:
        registers = Registers()
        _call(_GETREGS, self.tid, 0, ctypes.addressof(registers))
        return registers

    def set_registers(self, registers: Registers) -> None:
        _call(_SETREGS, self.tid, 0, ctypes.addressof(registers))

    def save_xstate(self) -> None:
        """Keep the floating-point and vector state, whatever its size on this machine."""
        self._iovec = _Iovec(ctypes.addressof(self._xstate), _XSTATE_BYTES)
        _call(_GETREGSET, self.tid, _NT_X86_XSTATE, ctypes.addressof(self._iovec))

    def restore_xstate(self) -> None:
        iovec = _Iovec(ctypes.addressof(self._xstate), self._iovec.length)
        _call(_SETREGSET, self.tid, _NT_X86_XSTATE, ctypes.addressof(iovec))


def block_signals() -> None:
    """Block a terminal's signals: Ctrl-C must not end the tracer between two register writes. `wait` needs SIGCHLD."""
    interactive = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP}
    signal.pthread_sigmask(signal.SIG_BLOCK, interactive | {signal.SIGCHLD})


def _call(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)} (ptrace {request:#x})")
