"""The loop: poll the trace, take keys, draw. On a terminal a screen of its own; elsewhere plain lines."""

import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from mxprobe.trace.tail import TraceTail

from .controls import Controls
from .keys import Keyboard
from .state import COLUMNS, LiveState
from .view import plain_line, render

_KEY_WAIT_S = 0.1
_ONCE_LINES = 36


def watch(directory: Path, *, interval_s: float, once: bool = False, console: Console | None = None) -> None:
    """Show a trace until it is closed, its writer has died, or the user quits.

    On a terminal it stays until `q`, Ctrl-C or SIGTERM. Otherwise it prints a line when there is a new step, at most
    one per `interval_s`, and ends with the trace.

    Raises:
        TraceError: no readable trace there.
    """
    out = console or Console(highlight=False)
    tail = TraceTail(directory, COLUMNS)
    state = LiveState()
    while rows := tail.poll():
        state.update_all(rows)
    if once:
        out.print(_picture(tail, state, Controls(is_shown_once=True), out, height=_ONCE_LINES))
    elif out.is_terminal and not out.is_dumb_terminal:
        _watch_screen(tail, state, out, interval_s)
    else:
        _watch_lines(tail, state, out, interval_s)


def _watch_screen(tail: TraceTail, state: LiveState, out: Console, interval_s: float) -> None:
    controls, keyboard = Controls(), Keyboard()
    with _quits_on_sigterm(), keyboard.unbuffered():
        try:
            with Live(console=out, screen=True, auto_refresh=False, transient=True) as live:
                polled_at, size = time.monotonic(), out.size
                live.update(_picture(tail, state, controls, out, height=size.height), refresh=True)
                while not controls.has_quit:
                    keys = keyboard.read(min(_KEY_WAIT_S, interval_s))
                    for key in keys:
                        controls.press(key)
                    is_due = not controls.is_paused and time.monotonic() - polled_at >= interval_s
                    if is_due:
                        state.update_all(tail.poll())
                        polled_at = time.monotonic()
                    if keys or is_due or out.size != size:
                        size = out.size
                        live.update(_picture(tail, state, controls, out, height=size.height), refresh=True)
        except KeyboardInterrupt:
            pass
    out.print(plain_line(state), markup=False, soft_wrap=True)


def _watch_lines(tail: TraceTail, state: LiveState, out: Console, interval_s: float) -> None:
    shown_step: int | None = None
    try:
        for rows in tail.follow(interval_s):
            state.update_all(rows)
            if not rows and state.last_step != shown_step:
                shown_step = state.last_step
                out.print(plain_line(state), markup=False, soft_wrap=True)
                out.file.flush()
        out.print("the trace is closed" if tail.state == "closed" else "the writer died", markup=False)
    except KeyboardInterrupt:
        return


def _picture(tail: TraceTail, state: LiveState, controls: Controls, out: Console, *, height: int) -> RenderableType:
    return render(
        state,
        controls,
        name=tail.directory.name,
        status=tail.state,
        width=out.width,
        height=height,
        ascii_only=out.options.ascii_only,
    )


@contextmanager
def _quits_on_sigterm() -> Generator[None]:
    """SIGTERM leaves through the same door as Ctrl-C, so that the terminal is put back."""

    def leave(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.stdout.flush()
