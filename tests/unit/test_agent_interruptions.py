"""What a signal handler raised while our code ran is told from our own errors, whatever kind of callable it is."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mxprobe.measuring.interruptions import is_of_a_signal_handler


class TooLateError(Exception):
    pass


def give_up(number: int, frame: Any) -> None:
    raise TooLateError


def give_up_of(task: str, number: int, frame: Any) -> None:
    raise TooLateError(task)


class Handlers:
    def method(self, number: int, frame: Any) -> None:
        raise TooLateError

    def __call__(self, number: int, frame: Any) -> None:
        raise TooLateError


@pytest.mark.parametrize(
    "handler",
    [
        give_up,
        Handlers().method,
        Handlers(),
        partial(give_up_of, "a task"),
        partial(partial(give_up_of), "a task"),
        partial(Handlers().method),
        partial(Handlers()),
    ],
)
def test_a_handler_s_exception_is_known(handler: Callable[[int, Any], None]):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TooLateError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert is_of_a_signal_handler(raised.value)
        assert not is_of_a_signal_handler(ValueError())
    finally:
        signal.signal(signal.SIGUSR1, before)
