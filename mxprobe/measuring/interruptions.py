"""Exceptions that reach our code and are the user's: raised by a signal handler while a hook of ours ran.

Handlers run between two bytecodes of whatever the main thread is at, so a time limit (`SIGALRM` and an exception, as
graders of answers set it) may strike in a hook. Imports no torch.
"""

from __future__ import annotations

import signal
import threading
from functools import partial
from types import CodeType, FunctionType
from typing import Any


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Say whether a handler of a signal is among the frames that the exception came through."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler written in Python; None for any other."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not isinstance(function, FunctionType):
        function = vars(type(function)).get("__call__")
    return function.__code__ if isinstance(function, FunctionType) else None
