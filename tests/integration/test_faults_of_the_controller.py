"""What may go wrong around a live trainer: disks, directories, signals, stopped and rival controllers. Real processes.

The trainer never notices: its losses are those of a run that nobody attached to, and what was recorded can be read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mxprobe.trace import open_trace
from tests.attach_targets import MXPROBE, Trainer, mxprobe, nothing_left, running, training, until

SCHEDULE = ("--every", "2", "--weights-every", "4", "--sensitivity-every", "20", "--record")
PATIENCE_S = 90.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def private_base() -> Generator[Path]:
    """A socket's path must be short."""
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as base:
        patch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base, f"mxprobe-{os.getuid()}")
    patch.undo()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Generator[Trainer]:
    """One for all tests; in the end its losses are held against those of a run of its own."""
    directory = tmp_path_factory.mktemp("trainer")
    with training(directory) as watched:
        yield watched
        assert watched.process.poll() is None
        seen = watched.losses()
    alone = tmp_path_factory.mktemp("alone")
    with training(alone, environ={"PAUSE_S": "0"}) as control:
        until(lambda: len(control.losses()) >= len(seen), timeout_s=180)
        assert control.losses()[: len(seen)] == seen


@contextmanager
def attaching(trainer: Trainer, trace: Path) -> Generator[subprocess.Popen[str]]:
    """`mxprobe attach` in the foreground, with rows on disk."""
    command = [*MXPROBE, "attach", trainer.pid, "-o", str(trace), *SCHEDULE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: list(trace.glob("live/rank=0/overhead*")) or process.poll() is not None, timeout_s=PATIENCE_S)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def is_clean(trainer: Trainer) -> None:
    until(lambda: nothing_left(trainer.residue()), timeout_s=PATIENCE_S)
    trainer.wait_for_steps(3)


@contextmanager
def small_disk(directory: Path, options: str) -> Generator[Path]:
    """A file system of its own, until the end of the block."""
    disk = directory / "disk"
    disk.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs root, and to be allowed to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    ("options", "words", "can_be_read"),
    [
        ("size=128k", "No space left on device", True),
        ("nr_inodes=7", "No space left on device", True),
        ("ro", "Read-only file system", False),
    ],
)
def test_a_disk_that_takes_no_more(
    options: str, words: str, can_be_read: bool, trainer: Trainer, tmp_path: Path, private_base: Path
) -> None:
    with small_disk(tmp_path, options) as disk:
        done = mxprobe("attach", trainer.pid, "-o", str(disk / "a.mxprobe"), *SCHEDULE, timeout_s=PATIENCE_S)
        assert done.returncode == 3, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        if can_be_read:
            trace = open_trace(disk / "a.mxprobe")
            assert not trace.events().empty
    is_clean(trainer)
    assert list(private_base.iterdir()) == []


def test_no_room_for_the_agent(trainer: Trainer, tmp_path: Path, private_base: Path) -> None:
    """The private directory's disk is full: no file may grow beyond a few bytes."""
    prefix = ("prlimit", "--fsize=20000")
    done = mxprobe("attach", trainer.pid, "-o", str(tmp_path / "a"), prefix=prefix, timeout_s=PATIENCE_S)
    assert done.returncode == 4
    assert "could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert list(private_base.iterdir()) == []
    is_clean(trainer)


def test_a_directory_that_vanishes(trainer: Trainer, tmp_path: Path, private_base: Path) -> None:
    """Rows written into removed files would be acknowledged and lost."""
    trace = tmp_path / "a.mxprobe"
    with attaching(trainer, trace) as controller:
        shutil.rmtree(trace)
        _, err = controller.communicate(timeout=PATIENCE_S)
    assert controller.returncode == 3, err
    assert "is no longer there" in err
    assert "Traceback" not in err
    assert not trace.exists()
    is_clean(trainer)
    assert list(private_base.iterdir()) == []


def test_a_controller_that_is_stopped_for_a_moment_and_for_good(trainer: Trainer, tmp_path: Path) -> None:
    """As one whose disk hangs. Within the lease nothing is lost; beyond it the agent takes itself off."""
    trace = tmp_path / "a.mxprobe"
    with attaching(trainer, trace) as controller:
        controller.send_signal(signal.SIGSTOP)
        trainer.wait_for_steps(40)
        controller.send_signal(signal.SIGCONT)
        trainer.wait_for_steps(20)
        status = json.loads(mxprobe("status", trainer.pid, "--json").stdout)[0]
        assert (status["agent"]["n_dropped"], status["agent"]["n_errors"]) == (0, 0)
        overhead = open_trace(trace).overhead()
        steps = sorted(overhead["step"])
        assert steps == list(range(steps[0], steps[0] + len(steps))), "a step is missing"
        controller.send_signal(signal.SIGSTOP)
        until(lambda: nothing_left(trainer.residue()), timeout_s=PATIENCE_S)
        controller.send_signal(signal.SIGCONT)
        _, err = controller.communicate(timeout=PATIENCE_S)
    assert controller.returncode == 0, err
    # Its goodbye may not have found room in the socket of a process that does not read.
    assert "it heard nothing from this process for too long" in err or "the agent went away" in err
    assert open_trace(trace).is_complete
    is_clean(trainer)


def test_a_rival_controller_is_refused_and_the_first_goes_on(trainer: Trainer, tmp_path: Path) -> None:
    """One that does not see the first one's directory gets as far as the process, which says no."""
    trace = tmp_path / "a.mxprobe"
    with attaching(trainer, trace) as controller, tempfile.TemporaryDirectory(prefix="mxq-", dir="/tmp") as elsewhere:
        again = mxprobe("attach", trainer.pid, "-o", str(tmp_path / "b"), timeout_s=PATIENCE_S)
        environ = {**os.environ, "XDG_RUNTIME_DIR": elsewhere, "TMPDIR": elsewhere}
        hidden = mxprobe("attach", trainer.pid, "-o", str(tmp_path / "c"), timeout_s=PATIENCE_S, env=environ)
        for refused in (again, hidden):
            assert refused.returncode == 4, refused.stderr
            assert "already attached" in refused.stderr
        before = len(open_trace(trace).overhead())
        until(lambda: len(open_trace(trace).overhead()) > before + 5, timeout_s=PATIENCE_S)
        controller.send_signal(signal.SIGTERM)
        _, err = controller.communicate(timeout=PATIENCE_S)
    assert controller.returncode == 0, err
    assert open_trace(trace).is_complete
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "c").exists()
    is_clean(trainer)


# What a job may make of a signal: die of it, end with its own code, or go on.
SIGNALLED = """
import os, signal, sys, time, torch
what = sys.argv[1]
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def leave(*_):
    sys.exit(7)
def save(*_):
    torch.save(model.state_dict(), sys.argv[2])
if what == "exits":
    signal.signal(signal.SIGTERM, leave)
if what == "saves":
    signal.signal(signal.SIGTERM, save)
print("up", flush=True)
try:
    while True:
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)
except KeyboardInterrupt:
    sys.exit(9)
"""


@pytest.mark.parametrize(
    ("what", "number", "code"),
    [("dies", signal.SIGTERM, -15), ("exits", signal.SIGTERM, 7), ("interrupted", signal.SIGINT, 9)],
)
def test_a_signal_to_the_job_does_what_it_always_did(what: str, number: int, code: int, tmp_path: Path) -> None:
    trace, environ = tmp_path / "a.mxprobe", {**os.environ, "OMP_NUM_THREADS": "1"}
    with running(SIGNALLED, what, str(tmp_path / "saved"), env=environ) as process:
        job = Trainer(process, tmp_path / "none")
        with attaching(job, trace) as controller:
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == code
            _, err = controller.communicate(timeout=PATIENCE_S)
    assert controller.returncode == 0, err
    assert "the process has ended" in err
    opened = open_trace(trace)
    assert opened.is_complete
    assert not opened.overhead().empty
