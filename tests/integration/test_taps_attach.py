"""A plain script that logs without steps, attached by PID: its numbers at the trainer's own steps, then all undone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from mxprobe.trace import open_trace

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch

out = Path(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)


class Run:
    def log(self, data, step=None, commit=None):
        pass


def module(name, **members):
    made = sys.modules[name] = type(sys)(name)
    vars(made).update(members)
    return made


run = Run()
module("wandb.sdk.wandb_run", Run=Run)
wandb = module("wandb", log=run.log)  # as `wandb.init` leaves it
bound, function, writer = wandb.log, vars(Run)["log"], None
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters())
step, wrapped = 0, False
while not (out / "stop").exists():
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    wandb.log({"entropy": float(step)})
    wandb.log({"loss": torch.tensor(float(step))})
    wrapped |= vars(Run)["log"] is not function
    if wrapped and writer is None:
        from torch.utils.tensorboard import SummaryWriter  # imported after the attach

        add_scalar = vars(SummaryWriter)["add_scalar"]
        writer = SummaryWriter(str(out))
    if writer:
        writer.add_scalar("reward", float(step), step)
        writer.add_scalar("entropy", float(step), step)  # the same number to a second logger
    if step == 20:
        (out / "going").touch()
    time.sleep(0.01)
restored = wandb.log is bound and vars(Run)["log"] is function and vars(SummaryWriter)["add_scalar"] is add_scalar
(out / "result.json").write_text(json.dumps({"wrapped": wrapped, "restored": restored}))
"""


def test_a_script_that_logs_without_steps(tmp_path: Path) -> None:
    script, trace_directory = tmp_path / "plain.py", tmp_path / "trace"
    script.write_text(SCRIPT)
    job = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "going").exists():
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.1)
        attach = [sys.executable, "-m", "mxprobe", "attach", str(job.pid), "-o", str(trace_directory)]
        done = subprocess.run([*attach, "--duration", "6s"], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        (tmp_path / "stop").touch()
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.communicate()
    assert json.loads((tmp_path / "result.json").read_text()) == {"wrapped": True, "restored": True}
    trace = open_trace(trace_directory)
    signals = trace.signals()
    assert set(signals.raw_key) == {"entropy", "loss", "reward"}
    assert (signals.step == signals.value).all()
    assert not signals.duplicated(["raw_key", "step"]).any()
    assert set(signals.metric) == {"entropy", "loss", "reward_mean"}
    assert signals[signals.raw_key == "reward"].step.min() > signals[signals.raw_key == "loss"].step.min()
    told = trace.events().query("kind == 'tap'").detail
    assert [detail.split(" ")[0].split(".")[0] for detail in told] == ["wandb", "torch"]
    assert trace.overhead().n_errors.max() == 0
