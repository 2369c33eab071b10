"""The injector's work done by gdb, where ours does not know the machine's registers. It is slower, nothing else.

The same calls in the same order (`mmap`, write the statement, `Py_AddPendingCall(PyRun_SimpleString, page)`), at
addresses that we have looked up: gdb reads no symbols of the libraries, loads nothing and takes no lock of the
interpreter. All threads of the process stand still while gdb is attached, about as long as it runs.
"""

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from mxprobe.attach.elf import PAGE_BYTES, ImageError, find_libc, find_python, read_maps
from mxprobe.attach.injector import FUNCTIONS, statements_among
from mxprobe.attach.page_record import Page
from mxprobe.attach.process import Process
from mxprobe.attach.refusals import refuse

_TIMEOUT_S = 600.0  # not to be used up: a gdb that is killed in the middle of a call ends the process
_SETTINGS = (
    "set confirm off",
    "set pagination off",
    "set auto-load off",
    "set auto-solib-add off",
    "set debuginfod enabled off",
    "set unwindonsignal on",
)
_START = """\
set language c
set scheduler-locking on
handle all nostop noprint pass
handle SIGINT nostop noprint pass
"""
# `restore` that fails ends the script, and gdb lets go: nothing is queued then.
_QUEUE = """\
set $ready = ((int (*)(void)){initialized})()
printf "ready=%d\\n", $ready
if $ready
  set $page = ((unsigned long (*)(unsigned long, unsigned long, int, int, int, long)){mmap})(0, {size}, 3, 0x22, -1, 0)
  printf "page=%lu\\n", $page
  restore {file} binary (long)$page
  printf "first=%d\\n", *(unsigned char *)$page
  if *(unsigned char *)$page == {first}
    set $queued = ((int (*)(unsigned long, unsigned long)){add})({run}, $page)
    printf "queued=%d\\n", $queued
  end
end
detach
"""
_UNMAP = """\
set $left = ((int (*)(unsigned long, unsigned long)){munmap})({page}, {size})
printf "left=%d\\n", $left
"""


def is_here() -> bool:
    return shutil.which("gdb") is not None


def queue(process: Process, statement: str, directory: Path) -> dict[str, Any]:
    """Queue the statement; returns {pause_ms, page, size_bytes}. AttachError if it could not be queued.

    `directory` is private, and takes the files that gdb reads.
    """
    text = statement.encode() + b"\0"
    size_bytes = -(-len(text) // PAGE_BYTES) * PAGE_BYTES
    python, libc = _addresses(process.pid)
    (directory / "statement").write_bytes(text)
    script = _QUEUE.format(
        initialized=python["Py_IsInitialized"],
        mmap=libc["mmap"],
        size=size_bytes,
        file=directory / "statement",
        first=text[0],
        add=python["Py_AddPendingCall"],
        run=python["PyRun_SimpleString"],
    )
    said, output, pause_ms = _run(process, script, directory)
    if said.get("ready") == 0:
        raise refuse("not_ready", process.pid)
    if said.get("queued") != 0:
        raise refuse("injection_failed", process.pid, f"gdb: {output[-300:]}")
    return {"pause_ms": pause_ms, "page": said["page"], "size_bytes": size_bytes}


def unmap(process: Process, pages: list[Page], directory: Path) -> dict[str, Any]:
    """Unmap pages whose statements have run. Returns {pause_ms, unmapped}; AttachError if it could not."""
    ours = statements_among(process.pid, pages)
    if not ours:
        return {"pause_ms": 0.0, "unmapped": []}
    _, libc = _addresses(process.pid)
    script = "".join(_UNMAP.format(munmap=libc["munmap"], page=page, size=size) for page, size in ours)
    said, output, pause_ms = _run(process, script + "detach\n", directory)
    if said.get("left") != 0:
        raise refuse("injection_failed", process.pid, f"gdb: {output[-300:]}")
    return {"pause_ms": pause_ms, "unmapped": [page for page, _ in ours]}


def _addresses(pid: int) -> tuple[dict[str, int], dict[str, int]]:
    try:
        maps = read_maps(pid)
        python = find_python(pid, maps, FUNCTIONS, machine=None).addresses
        return python, find_libc(pid, maps, ("mmap", "munmap")).addresses
    except ImageError as error:
        raise refuse(error.reason, pid, error.detail) from None
    except OSError as error:
        raise refuse("not_permitted", pid, str(error)) from None


def _run(process: Process, script: str, directory: Path) -> tuple[dict[str, int], str, float]:
    """Return what the script printed as `name=number`, all of gdb's output, and for how many ms gdb ran."""
    path = directory / "gdb.script"
    path.write_text(_START + script)
    settings = [word for setting in _SETTINGS for word in ("-iex", setting)]
    command = ["gdb", "-nx", "-nw", "-batch", *settings, "-p", str(process.pid), "-x", str(path)]
    if not process.is_same_and_alive():
        raise refuse("exited", process.pid, "its PID now belongs to another process")
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise refuse("no_gdb", process.pid) from None
    pause_ms = (time.perf_counter() - started) * 1e3
    if "ptrace: Operation not permitted" in done.stdout or "Could not attach" in done.stdout:
        raise refuse("not_permitted", process.pid, "gdb could not attach")
    said = {name: int(value) for name, value in re.findall(r"^(\w+)=(-?\d+)$", done.stdout, re.MULTILINE)}
    return said, done.stdout.strip(), pause_ms
