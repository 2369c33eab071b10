"""A process that logs and trains nothing: its signals alone, beside the ranks of its job."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from mxprobe.trace import open_trace
from tests.attach_targets import mxprobe, running, until
from tests.integration.test_attach_job import TORCHRUN, facts_of, launched

# `python driver.py OUT [COMMAND...]`: logs as verl's driver does, to a stand-in of its module; no torch. SIGUSR1 makes
# the mismatch jump, SIGUSR2 has it say what is left of us.
DRIVER = """
import json, os, signal, subprocess, sys, threading, time
out, command = sys.argv[1], sys.argv[2:]
class Tracking:
    def log(self, data, step, backend=None):
        pass
module = sys.modules["verl.utils.tracking"] = type(sys)("verl.utils.tracking")
module.Tracking = Tracking
original = Tracking.log
kl = [0.01]
def residue(*_):
    left = {
        "wrapped": Tracking.log is not original,
        "threads": [t.name for t in threading.enumerate() if "mxprobe" in t.name],
        "modules": sorted(n for n in sys.modules if n.partition(".")[0] in ("mxprobe", "mxprobe_kernels", "torch")),
    }
    with open(out + ".new", "w") as file:
        json.dump(left, file)
    os.replace(out + ".new", out)
signal.signal(signal.SIGUSR1, lambda *_: kl.__setitem__(0, 0.5))
signal.signal(signal.SIGUSR2, residue)
child = subprocess.Popen(command) if command else None
print("up", flush=True)
step, tracking = 0, Tracking()
while child is None or child.poll() is None:
    step += 1
    tracking.log({"rollout_corr/kl": kl[0], "critic/rewards/mean": 0.5}, step=step)
    time.sleep(0.02)
"""


def test_a_process_without_torch_is_attached_for_its_signals(tmp_path: Path) -> None:
    trace, out = tmp_path / "a.mxprobe", tmp_path / "residue"
    with running(DRIVER, str(out)) as process:
        done = mxprobe("attach", str(process.pid), "-o", str(trace), "--background")
        assert done.returncode == 0, done.stderr
        until(lambda: len(open_trace(trace).signals()) > 10, timeout_s=60)
        status = json.loads(mxprobe("status", str(process.pid), "--json").stdout)[0]
        assert status["role"] == "metrics"
        assert mxprobe("status", str(process.pid)).returncode == 0
        done = mxprobe("detach", str(process.pid))
        assert done.returncode == 0, done.stderr
        process.send_signal(signal.SIGUSR2)
        until(out.exists)
        assert json.loads(out.read_text()) == {"wrapped": False, "threads": [], "modules": []}
        assert process.poll() is None
    signals = open_trace(trace).signals()
    assert set(signals["metric"].astype(str)) == {"mismatch_kl", "reward_shaped_mean"}
    assert set(signals["framework"].astype(str)) == {"verl"}
    assert signals["step"].min() > 0
    assert signals["step"].is_monotonic_increasing
    assert facts_of(trace)["ranks"][0]["role"] == "metrics"


def test_a_process_that_has_torch_and_takes_a_step_after_all_becomes_a_trainer(tmp_path: Path) -> None:
    trace, go = tmp_path / "a.mxprobe", tmp_path / "go"
    source = DRIVER.replace("while child", "import torch\nwhile child").replace(
        "    time.sleep(0.02)",
        "    time.sleep(0.02)\n"
        "    if os.path.exists(out):\n"
        "        if step < 10**6:\n"
        "            step = 10**6\n"
        "            model = torch.nn.Linear(32, 32)\n"
        "            optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "        model(torch.randn(4, 32)).square().mean().backward()\n"
        "        optimizer.step()\n",
    )
    with running(source, str(go), env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        options = ("--step-timeout", "8", "--every", "5", "--background", "-o", str(trace))
        done = mxprobe("attach", str(process.pid), *options)
        assert done.returncode == 0, done.stderr
        assert facts_of(trace)["role"] == "metrics"
        go.touch()
        until(lambda: len(open_trace(trace).tensors()), timeout_s=60)
        assert facts_of(trace)["role"] == "trainer"
        assert mxprobe("detach", str(process.pid)).returncode == 0


@pytest.mark.slow
def test_the_driver_of_a_job_is_listened_to_and_what_it_logs_triggers_the_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    launcher = (sys.executable, "-c", DRIVER, str(tmp_path / "residue"), *TORCHRUN, "--nproc-per-node=2")
    with launched(tmp_path / "job", launcher, 2, "0") as job:
        options = ("--job", job.pid, "-o", str(trace), "--background", "--record", "--every", "1000")
        done = mxprobe("attach", *options, timeout_s=120)
        assert done.returncode == 0, done.stderr
        assert "2 ranks on this machine; 1 beside them" in done.stderr
        until(lambda: len(open_trace(trace).signals()) > 40, timeout_s=60)
        job.launcher.send_signal(signal.SIGUSR1)

        def triggered() -> set[int]:
            events = open_trace(trace).events()
            return set(events[events["detail"].str.contains("mismatch jump")]["rank"])

        until(lambda: triggered() >= {0, 1}, timeout_s=60)
        assert mxprobe("detach", "--job", job.pid, timeout_s=120).returncode == 0
    roles = {rank["rank"]: rank["role"] for rank in facts_of(trace)["ranks"]}
    assert roles == {0: "trainer", 1: "trainer", 2: "metrics"}
    assert set(open_trace(trace).signals()["rank"]) == {2}
    assert set(open_trace(trace).table("flight")["rank"]) == {0, 1}
