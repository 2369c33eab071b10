"""`mxprobe run --emulate` and `mxprobe set` on real processes: their losses are those of a script that does the same by
hand, bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mxprobe as package
import mxprobe_kernels
from tests.attach_targets import MXPROBE, mxprobe, running, until

# Reads its orders from argv: OUT, and what to do by hand after so many steps, as STEP=RECIPE. Ends after LAST_STEP
# steps, or when OUT.stop exists; after HOLD_AT steps it waits for OUT.go.
TRAINER = """
import os, sys, time
out, *orders = sys.argv[1:]
orders = dict(order.split("=", 1) for order in orders)
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.lm_head = nn.Linear(48, 48)
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.lm_head(x)
    @torch.no_grad()
    def generate(self, x):
        return self(x).square().sum()
model = Model()
emulation = None
def obey(step):
    global emulation
    if str(step) in orders:
        import mxprobe
        if emulation is None:
            emulation = mxprobe.emulate(model, orders[str(step)])
        else:
            emulation.set(orders[str(step)], now=True)
obey(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = open(out, "w", buffering=1)
print("up", flush=True)
step, last = 0, int(os.environ["LAST_STEP"])
while step < last and not os.path.exists(out + ".stop"):
    reward = model.generate(torch.randn(4, 48))
    loss = model(torch.randn(16, 48)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    losses.write(reward.item().hex() + " " + loss.item().hex() + "\\n")
    obey(step)
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    while step == int(os.environ.get("HOLD_AT", "-1")) and not os.path.exists(out + ".go"):
        time.sleep(0.01)
"""


def environ(last_step: int, **more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "LAST_STEP": str(last_step), **more}


def by_hand(tmp_path: Path, last_step: int, *orders: str) -> list[str]:
    out = tmp_path / "by_hand.txt"
    command = [sys.executable, "-c", TRAINER, str(out), *orders]
    subprocess.run(command, env=environ(last_step), check=True, capture_output=True, timeout=300)
    return out.read_text().splitlines()


def under_run(tmp_path: Path, recipe: str, last_step: int) -> tuple[list[str], str]:
    out = tmp_path / "run.txt"
    command = [*MXPROBE, "run", "--emulate", recipe, "--", sys.executable, "-c", TRAINER, str(out)]
    done = subprocess.run(command, env=environ(last_step), check=True, capture_output=True, text=True, timeout=300)
    return out.read_text().splitlines(), done.stderr


def test_an_emulated_run_is_the_script_that_emulates(tmp_path: Path) -> None:
    """Also in its first `generate`, which comes before any training step."""
    got, said = under_run(tmp_path, "paper@rollout", 5)
    assert got == by_hand(tmp_path, 5, "0=paper@rollout")
    assert "mxprobe: Model is emulated: " in said
    assert "mxprobe:   left out  lm_head Linear: excluded by *lm_head*" in said


@pytest.mark.slow
def test_an_emulated_run_is_another_run_unless_the_recipe_is_none(tmp_path: Path) -> None:
    plain = by_hand(tmp_path, 5)
    for recipe in ("paper", "paper@train", "all=mxfp4/rceil+sr"):
        got, _ = under_run(tmp_path, recipe, 5)
        assert got == by_hand(tmp_path, 5, f"0={recipe}") != plain
    assert under_run(tmp_path, "none", 5)[0] == plain


def test_a_recipe_from_a_file_is_read_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('name = "mine"\n[operands]\nx_fwd = "mxfp5"\n')
    done = mxprobe("run", "--emulate", str(tmp_path / "r.toml"), "--", sys.executable, "-c", "print('started')")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "unknown format 'mxfp5'" in done.stderr


@pytest.mark.slow
def test_the_package_need_not_be_installed_where_the_job_runs(tmp_path: Path) -> None:
    """The start-up hook alone, in an interpreter whose path has no mxprobe."""
    ours = [str(Path(p.__file__).parent) for p in (mxprobe_kernels, package)]
    code = (
        "import sys\n"
        f"sys.path[:] = [p for p in sys.path if p not in {[str(Path(d).parent) for d in ours]!r}]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "from importlib.util import find_spec, spec_from_file_location, module_from_spec\n"
        "assert find_spec('mxprobe') is None\n"
        f"spec = spec_from_file_location('hook', {str(Path(ours[1]) / 'attach' / 'startup' / 'emulate.py')!r})\n"
        "hook = module_from_spec(spec)\nspec.loader.exec_module(hook)\n"
        "import torch\n"
        f"hook.start('paper', {ours!r})\n"
        "net = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "print(net._mxprobe_emulation)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "paper · 1 modules emulated, 0 left out\n"


def test_a_live_switch_is_the_script_that_switches_at_that_step(tmp_path: Path) -> None:
    """From not emulated to a recipe, to another one, and to none, in a process that has never imported mxprobe."""
    out, trace = tmp_path / "live.txt", tmp_path / "t.mxprobe"
    orders: list[str] = []
    with running(TRAINER, str(out), env=environ(10**6, PAUSE_S="0.02", HOLD_AT="3")) as process:
        pid = str(process.pid)
        attach = subprocess.Popen(
            [*MXPROBE, "attach", pid, "-o", str(trace), "--every", "1000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until(lambda: phase(pid) == "observing", timeout_s=60)
            Path(f"{out}.go").touch()
            until(lambda: phase(pid) == "recording", timeout_s=60)
            for recipe in ("paper", "paper x_fwd=mxfp4/rceil+of:0.5", "none"):
                done = mxprobe("set", pid, "--recipe", recipe, timeout_s=120)
                assert done.returncode == 0, done.stderr
                step = int(re.search(r"from step (\d+) on", done.stdout)[1])  # pyright: ignore[reportOptionalSubscript]
                orders.append(f"{step - 1}={recipe}")
            Path(f"{out}.stop").touch()
            process.wait(120)
        finally:
            _, said = attach.communicate(timeout=60)
    losses = out.read_text().splitlines()
    assert losses == by_hand(tmp_path, len(losses), *orders), said
    events = package.open_trace(trace).events()
    recipes = events[events["kind"] == "emulation"]
    told = zip(recipes["step"], recipes["detail"], strict=True)
    assert [f"{step - 1}={detail.partition(' · ')[0]}" for step, detail in told] == orders


def phase(pid: str) -> Any:
    done = mxprobe("status", pid, "--json")
    return json.loads(done.stdout)[0]["phase"] if done.returncode == 0 else None


@pytest.mark.slow
def test_an_emulated_run_tells_its_recipe_to_the_trace(tmp_path: Path) -> None:
    out, trace = tmp_path / "run.txt", tmp_path / "t.mxprobe"
    command = [*MXPROBE, "run", "--emulate", "paper", "-o", str(trace), "--", sys.executable, "-c", TRAINER, str(out)]
    with subprocess.Popen(command, env=environ(10**6, PAUSE_S="0.02"), stderr=subprocess.DEVNULL) as job:
        try:
            until(lambda: phase(str(job.pid)) == "recording", timeout_s=90)
            assert "  recipe     paper · 2 modules emulated, 1 left out\n" in mxprobe("status", str(job.pid)).stdout
            done = mxprobe("detach", str(job.pid), timeout_s=120)
            assert done.returncode == 0
            assert "it goes on under the recipe paper · 2 modules emulated" in done.stderr
        finally:
            job.kill()
    written = package.open_trace(trace)
    assert written.run["recipes"] == ["paper · 2 modules emulated, 1 left out"]
    events = written.events()
    assert list(events[events["kind"] == "emulation"]["detail"]) == written.run["recipes"]


def test_what_is_not_attached_is_not_switched() -> None:
    done = mxprobe("set", str(os.getpid()), "--recipe", "paper")
    assert done.returncode == 4
    assert "is not attached; nothing was switched" in done.stderr
    assert mxprobe("set", str(os.getpid()), "--recipe", "papr").returncode == 2
