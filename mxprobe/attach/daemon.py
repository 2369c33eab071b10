"""Processes that go on without a terminal: a controller whose command returns once it is attached, or refused."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mxprobe.errors import MxprobeError

LOG_NAME = "mxprobe.log"
_FAILED = 70

Attach = Callable[[Callable[[], None]], None]


def fork_daemon(log: Path) -> bool:
    """Fork a process of its own session, which is nobody's child. Return True in it, False in the caller.

    Its output is appended to `log`, and it has no input. It must not return to the caller's code, but end by `_exit`.
    """
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return False
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
    except BaseException:
        os._exit(_FAILED)
    return True


def run_in_background(attach: Attach, log: Path) -> int:
    """Run `attach(ready)` in a daemon; returns its PID once `ready()`.

    Its output goes to `log`. An error that it raises before it is ready is raised here, with its words and exit code.
    Then the log is removed again, with its directory if nothing else is in it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    if fork_daemon(log):
        os.close(reading)
        _run(attach, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        message = pipe.readline()
    answer: dict[str, Any] = json.loads(message) if message else {"what": "The background process ended at once."}
    if "pid" in answer:
        return int(answer["pid"])
    if message:
        log.unlink(missing_ok=True)
        with suppress(OSError):
            log.parent.rmdir()
    error = MxprobeError(answer["what"], cause=answer.get("cause", ""), remedy=answer.get("remedy", f"see {log}"))
    error.exit_code = answer.get("exit_code", MxprobeError.exit_code)
    raise error


def _run(attach: Attach, writing: int) -> None:
    """Attach, and tell the command how it went. Never returns."""
    code = _FAILED
    try:
        attach(lambda: _tell(writing, {"pid": os.getpid()}))
        code = 0
    except MxprobeError as error:
        print(error, file=sys.stderr)
        fields = {"what": error.what, "cause": error.cause, "remedy": error.remedy, "exit_code": error.exit_code}
        _tell(writing, fields)
        code = error.exit_code
    except BaseException as error:
        import traceback

        traceback.print_exc()
        _tell(writing, {"what": f"The background process failed: {type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _tell(pipe: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the command has had its answer and is gone
        os.write(pipe, (json.dumps(message) + "\n").encode())
