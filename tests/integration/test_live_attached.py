"""`mxprobe live PID` on a trainer that is really attached: PID to trace, and an end with the detach."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.attach_targets import MXPROBE, mxprobe, training, until


@pytest.mark.slow
def test_a_pid_leads_to_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as base, training(tmp_path) as trainer:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        refused = mxprobe("live", trainer.pid)
        assert refused.returncode == 4
        assert f"Process {trainer.pid} is not attached." in refused.stderr

        trace = tmp_path / "run.mxprobe"
        attach = subprocess.Popen(
            [*MXPROBE, "attach", trainer.pid, "-o", str(trace), "--every", "5", "--weights-every", "20"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        watcher = None
        try:
            until(lambda: (trace / "run.json").exists() or attach.poll() is not None, timeout_s=90)
            assert attach.poll() is None, attach.communicate()
            watcher = subprocess.Popen(
                [*MXPROBE, "live", trainer.pid, "--interval", "0.2s"], stdout=subprocess.PIPE, text=True
            )
            assert watcher.stdout is not None
            line = watcher.stdout.readline()
            assert line.startswith("step ")
            assert mxprobe("detach", trainer.pid).returncode == 0
            attach.communicate(timeout=60)
            assert attach.returncode == 0
            rest, _ = watcher.communicate(timeout=60)
            assert watcher.returncode == 0
            *lines, last = [line, *rest.splitlines()]
            assert last == "the trace is closed"
            assert "worst" in lines[-1]
            assert "overhead" in lines[-1]
        finally:
            for process in (attach, watcher):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.communicate()
