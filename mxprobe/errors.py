"""Errors with words: what failed, the likely cause, what to do next; and the exit code each ends in."""

EXIT_OK = 0
EXIT_BREACHED = 1
EXIT_USAGE = 2
EXIT_TRACE = 3
EXIT_ATTACH = 4
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
"""128 + SIGPIPE: whoever read the output has left, e.g. `| head -1`."""


class MxprobeError(Exception):
    """Base of every error that a user sees. `str()` is the whole message."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, *, cause: str = "", remedy: str = "") -> None:
        self.what = what
        self.cause = cause
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.cause:
            lines.append(f"  likely cause: {self.cause}")
        if self.remedy:
            lines.append(f"  what to do:   {self.remedy}")
        return "\n".join(lines)


class UsageError(MxprobeError):
    exit_code = EXIT_USAGE


class TraceError(MxprobeError):
    """No trace, not a trace, or one this version cannot read."""

    exit_code = EXIT_TRACE


class AttachError(MxprobeError):
    """The process could not be attached. `reason` is a stable slug, e.g. `no_such_process`."""

    exit_code = EXIT_ATTACH

    def __init__(self, reason: str, what: str, *, cause: str = "", remedy: str = "") -> None:
        self.reason = reason
        super().__init__(what, cause=cause, remedy=remedy)
