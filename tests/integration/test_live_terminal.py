"""`mxprobe live` on a real pseudo-terminal and in a pipe, while another process writes the trace."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.writing import Writing, writing_process


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    with writing_process(tmp_path, n_steps=400, every=1, until_table="tensors") as process:
        yield process


class Terminal:
    """A pseudo-terminal with `mxprobe live` in it."""

    def __init__(self, directory: Path, *, rows: int, columns: int, **environment: str) -> None:
        self.outer, self.inner = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.inner)
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mxprobe", "live", str(directory), "--interval", "0.2s"],
            stdin=self.inner,
            stdout=self.inner,
            stderr=self.inner,
            env={**inherited, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.outer, keys.encode())

    def read_until(self, wanted: str, timeout_s: float = 60.0) -> str:
        """What the program has written since, up to and with `wanted` (a pattern)."""
        text, deadline = "", time.monotonic() + timeout_s
        while not re.search(wanted, text):
            ready, _, _ = select.select([self.outer], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {wanted!r} in {text[-3000:]!r}"
            text += os.read(self.outer, 65536).decode(errors="replace")
        return text

    def read_until_step(self, step: int) -> None:
        """Until the picture shows that step or a later one; polls may skip some."""
        while step_in(self.read_until(r"mxprobe  step \d+ ")) < step:
            pass

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.outer)
        os.close(self.inner)


@pytest.fixture
def terminal(writing: Writing) -> Iterator[Terminal]:
    opened = Terminal(writing.directory, rows=30, columns=120)
    yield opened
    opened.close()


def step_in(text: str) -> int:
    """The step in the title, or at the start of a plain line; events name steps, too."""
    return int(re.findall(r"(?:mxprobe  |^)step (\d+)", text)[-1])


def test_it_follows_takes_keys_resizes_and_leaves_the_terminal_as_it_was(writing: Writing, terminal: Terminal) -> None:
    first = step_in(terminal.read_until(r"(?s)step [1-9].*q quit"))
    terminal.read_until_step(first + 3)  # it follows the writer

    terminal.press("/up_proj\r")
    body = terminal.read_until(r"6 operands matching 'up_proj'")
    assert "up_proj" in body
    terminal.press("s")
    terminal.read_until(r"zeros v")

    terminal.press("p")
    paused = step_in(terminal.read_until(r"(?s)PAUSED.*p pause"))
    time.sleep(1.0)
    terminal.resize(24, 60)
    narrow = terminal.read_until(r"(?s)PAUSED.*p pause")
    assert step_in(narrow) == paused
    assert "in rollout" not in narrow  # no room for it now
    assert "mlp.up_proj  " in narrow  # a long name keeps its end

    terminal.press("p")
    terminal.read_until_step(paused + 1)
    terminal.press("q")
    assert terminal.process.wait(30) == 0
    assert termios.tcgetattr(terminal.inner) == terminal.before
    assert writing.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(terminal: Terminal, number: signal.Signals) -> None:
    terminal.read_until("q quit")
    terminal.process.send_signal(number)
    assert terminal.process.wait(30) == 0
    assert "\x1b[?1049l" in terminal.read_until(r"\[\?1049l")  # back from the other screen
    assert termios.tcgetattr(terminal.inner) == terminal.before


def test_no_color_is_respected(writing: Writing) -> None:
    for environment, has_colour in (({}, True), ({"NO_COLOR": "1"}, False)):
        terminal = Terminal(writing.directory, rows=40, columns=120, **environment)
        try:
            body = terminal.read_until(r"(?s)deadzone.*q quit")
            assert bool(re.search(r"\x1b\[[0-9;]*38;", body)) == has_colour
        finally:
            terminal.close()


def test_a_pipe_gets_plain_lines_until_the_trace_is_closed(writing: Writing) -> None:
    command = [sys.executable, "-m", "mxprobe", "live", str(writing.directory), "--interval", "0.2s"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    lines = [watcher.stdout.readline() for _ in range(3)]
    writing.stop()
    rest, _ = watcher.communicate(timeout=60)
    lines += rest.splitlines()
    assert watcher.returncode == 0
    assert lines[-1] == "the trace is closed"
    steps = [step_in(line) for line in lines[:-1]]
    assert steps == sorted(set(steps))
    assert all("reward" in line and "dropped 0" in line for line in lines[:-1])
    assert not any("\x1b" in line for line in lines)


def test_a_writer_that_is_killed_ends_the_lines(writing: Writing) -> None:
    command = [sys.executable, "-m", "mxprobe", "live", str(writing.directory), "--interval", "0.2s"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    watcher.stdout.readline()
    writing.process.kill()
    rest, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    assert rest.splitlines()[-1] == "the writer died"
