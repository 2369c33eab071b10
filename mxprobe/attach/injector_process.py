"""The injector as a process of its own: what it is told, what it answers, and which refusal an answer stands for."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import mxprobe
from mxprobe.attach.elf import EM_X86_64, ImageError, find_python, read_maps
from mxprobe.attach.injector import FUNCTIONS
from mxprobe.attach.page_record import Page
from mxprobe.attach.process import Process
from mxprobe.attach.refusals import refuse
from mxprobe.errors import AttachError

_TIMEOUT_S = 60.0


def check_ptrace(process: Process, *, any_machine: bool = False) -> None:
    """Raise the AttachError that the injector (with `any_machine`: gdb) would end in, as far as /proc tells."""
    machine = platform.machine()
    if not any_machine and (sys.platform != "linux" or machine != "x86_64"):
        raise refuse("unsupported_architecture", process.pid, f"{platform.system()} on {machine}")
    if process.tracer_pid:
        raise refuse("being_traced", process.pid, str(process.tracer_pid))
    try:
        find_python(process.pid, read_maps(process.pid), FUNCTIONS, machine=None if any_machine else EM_X86_64)
    except ImageError as error:
        raise refuse(error.reason, process.pid, error.detail) from None
    except PermissionError as error:
        raise _not_permitted(process.pid, str(error)) from None
    except OSError:
        raise refuse("exited", process.pid, "just now") from None


def _not_permitted(pid: int, detail: str) -> AttachError:
    """Return the refusal by the kernel: by Yama's policy if that explains it, else for lack of capabilities."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    return refuse("ptrace_scope", pid, str(scope)) if scope else refuse("not_permitted", pid, detail)


def run_injector(process: Process, statement: str) -> dict[str, Any]:
    """Queue the statement; returns what the injector measured. AttachError if it could not be queued."""
    return _run(process, [], statement)


def unmap_statements(process: Process, pages: list[Page]) -> dict[str, Any]:
    """Unmap pages whose statements have run; returns what the injector measured. AttachError if it could not."""
    return _run(process, [f"{address}:{size_bytes}" for address, size_bytes in pages], "")


def _run(process: Process, arguments: list[str], statement: str) -> dict[str, Any]:
    """Run the injector. The caller's Ctrl-C does not stop it, and it always comes to let go of the process."""
    command = [sys.executable, "-P", "-m", "mxprobe.attach.injector", str(process.pid), str(process.start_ticks)]
    environ = dict(os.environ, PYTHONPATH=str(Path(mxprobe.__file__).parent.parent))
    environ.pop("MXPROBE_LISTEN", None)
    done = subprocess.run(
        [*command, *arguments],
        input=statement,
        capture_output=True,
        text=True,
        env=environ,
        start_new_session=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        detail = f"the injector ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        raise refuse("injection_failed", process.pid, detail) from None
    if "reason" not in answer:
        return answer
    if answer["reason"] == "not_permitted":
        raise _not_permitted(process.pid, answer["detail"])
    raise refuse(answer["reason"], process.pid, answer["detail"])
