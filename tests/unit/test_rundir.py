"""Private directories made side by side, and what is taken for a leftover."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mxprobe.attach.process import look_up
from mxprobe.attach.rundir import RunDirectory, clean_stale

ME = look_up(os.getpid())


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"mxprobe-{os.getuid()}"


def test_several_at_once_do_not_take_each_other_for_leftovers() -> None:
    """As the controllers of a job do; each cleans up before it makes its own."""
    n_ranks = 4
    start = threading.Barrier(n_ranks)

    def make(number: int) -> None:
        start.wait(10)
        RunDirectory.create(replace(ME, pid=number + 1, start_ticks=number)).close()

    with ThreadPoolExecutor(n_ranks) as pool:
        for _ in range(100):
            list(pool.map(make, range(n_ranks)))


@pytest.mark.parametrize("with_lock", [True, False])
def test_one_that_is_being_made_is_left_until_it_is_old(with_lock: bool, base: Path) -> None:
    directory = base / ".new-abc"
    directory.mkdir(mode=0o700, parents=True)
    base.chmod(0o700)
    if with_lock:
        (directory / "lock").touch()
    clean_stale()
    assert directory.exists()
    long_ago = time.time() - 3600
    os.utime(directory, (long_ago, long_ago))
    clean_stale()
    assert not directory.exists()
