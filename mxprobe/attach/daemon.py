"""A controller that goes on without a terminal: the command returns once it is attached, or refused."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mxprobe.errors import MxprobeError

LOG_NAME = "mxprobe.log"

Job = Callable[[Callable[[], None]], None]


def run_in_background(job: Job, log: Path) -> int:
    """Run `job(ready)` in a process of its own session that outlives this one; returns its PID once `ready()`.

    Its output goes to `log`. An error that it raises before it is ready is raised here, with its words and exit code.
    Then the log is removed again, with its directory if nothing else is in it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _become_daemon(job, log, writing)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        message = pipe.readline()
    answer: dict[str, Any] = json.loads(message) if message else {"what": "The background process ended at once."}
    if "pid" in answer:
        return int(answer["pid"])
    if message:
        log.unlink(missing_ok=True)
        with suppress(OSError):
            log.parent.rmdir()
    raise _rebuilt(answer, log)


def _become_daemon(job: Job, log: Path, writing: int) -> None:
    """Detach the first child from the session and the terminal, in a second child. Never returns."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
    except BaseException:
        os._exit(70)
    code = 70
    try:
        job(lambda: _tell(writing, {"pid": os.getpid()}))
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


def _rebuilt(answer: dict[str, Any], log: Path) -> MxprobeError:
    error = MxprobeError(
        str(answer["what"]), cause=str(answer.get("cause", "")), remedy=str(answer.get("remedy", f"see {log}"))
    )
    error.exit_code = int(answer.get("exit_code", MxprobeError.exit_code))
    return error
