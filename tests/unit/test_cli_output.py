"""Standard output that takes no more: a reader who has left, a full disk. In words or silently, never a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.errors import EXIT_PIPE, EXIT_USAGE
from tests.trace_files import frames, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("output") / "run.mxprobe", frames(1, 40, 10))


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_who_leaves_is_no_error(trace: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "mxprobe", "recommend", str(trace), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the first line is written: importing takes longer
        said = process.stderr.read()
    assert process.returncode == EXIT_PIPE
    assert said == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_in_words(trace: Path) -> None:
    command = [sys.executable, "-m", "mxprobe", "recommend", str(trace)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.splitlines()[-1].startswith("mxprobe: No space left on device")
    assert "Traceback" not in done.stderr
