"""`mxprobe attach --record` and `mxprobe trigger` on a real process whose weights go bad."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from mxprobe.trace import open_trace
from tests.attach_targets import mxprobe, running, until

# Breaks one weight of the second block on SIGUSR1.
TARGET = """
import signal, sys, time
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(Block(), Block(), nn.LayerNorm(16))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def spoil(*_):
    model[1].up.weight.data[3, 3] = float("nan")
signal.signal(signal.SIGUSR1, spoil)
print("up", flush=True)
while True:
    x = torch.randn(8, 4, 16)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
"""


def test_the_past_is_kept_and_the_first_bad_module_named(tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"

    def events() -> list[str]:
        found = open_trace(trace).events()
        return found[found["kind"].astype(str) == "flight"]["detail"].tolist()

    with running(TARGET, python=sys.executable) as process:
        pid = str(process.pid)
        assert mxprobe("trigger", pid).returncode == 4
        options = ("--record", "--every", "1000", "--weights-every", "1000", "-o", str(trace), "--background")
        done = mxprobe("attach", pid, *options)
        assert done.returncode == 0, done.stderr
        done = mxprobe("trigger", pid)
        assert done.returncode == 0, done.stderr
        assert "its past is written" in done.stderr
        until(lambda: len(events()) == 1, timeout_s=60)
        n_probed = until(lambda: open_trace(trace).tensors()["step"].nunique(), timeout_s=60)
        process.send_signal(signal.SIGUSR1)
        until(lambda: len(events()) == 2, timeout_s=60)
        until(lambda: open_trace(trace).tensors()["step"].nunique() > n_probed, timeout_s=60)
        assert mxprobe("detach", pid).returncode == 0

    asked, bad = events()
    assert asked.startswith("asked: mxprobe trigger; with ")
    assert bad.startswith("nonfinite: first bad module in order of execution: 1.up (output); with ")
    flight = open_trace(trace).table("flight")
    assert flight["norm"].notna().any()
    broken = flight[(flight["kind"].astype(str) == "output") & flight["norm"].isna()]
    first = broken[broken["step"] == broken["step"].min()].sort_values("position")
    assert first["name"].astype(str).tolist() == ["1.up", "1.act", "1.down", "2"]
    outputs = flight[flight["step"] == broken["step"].min()]
    assert set(outputs["name"].astype(str)) >= {"0.up", "0.act", "0.down", "0.up.weight", "2.bias"}
    told = mxprobe("recommend", str(trace))
    assert told.returncode == 0, told.stderr
    assert "note: flight recorder at step" in told.stderr
    assert "first bad module in order of execution: 1.up (output)" in told.stderr
