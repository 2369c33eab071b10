"""A process whose interpreter has torch and nothing of ours: no mxprobe, no pyarrow, no triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.trace import open_trace
from tests.attach_targets import TRAINER, Trainer, mxprobe, nothing_left, running

# What torch on a CPU imports. Whatever else is installed here is not there.
OF_TORCH = (
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("filelock", "fsspec", "numpy", "numpy.libs", "setuptools", "_distutils_hack"),
)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter of its own environment, in which torch is found by a .pth file."""
    directory = tmp_path_factory.mktemp("bare")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    installed, site = Path(spec.origin).parents[1], directory / "site"
    site.mkdir()
    for name in OF_TORCH:
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")], check=True)
    (packages,) = (directory / "venv").glob("lib/python3*/site-packages")
    (packages / "torch.pth").write_text(f"{site}\n")
    return str(directory / "venv" / "bin" / "python")


def test_it_is_attached_probed_and_detached(python: str, tmp_path: Path):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ours = ("mxprobe", "mxprobe_kernels", "pyarrow", "triton")
    question = f"import importlib.util as u; print([name for name in {ours} if u.find_spec(name)])"
    found = subprocess.run([python, "-c", question], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
    options = {"python": python, "env": {**env, "OMP_NUM_THREADS": "1"}, "cwd": tmp_path}
    with running(TRAINER, str(tmp_path / "losses.txt"), str(tmp_path / "stop"), **options) as process:
        trainer = Trainer(process, tmp_path / "losses.txt")
        trainer.wait_for_steps(3)
        trace = tmp_path / "run.mxprobe"
        done = mxprobe("attach", trainer.pid, "-o", str(trace), "--every", "2", "--duration", "4s", timeout_s=120)
        assert done.returncode == 0, done.stderr
        trainer.wait_for_steps(3)
        assert nothing_left(trainer.residue())
    opened = open_trace(trace)
    assert opened.problems == []
    assert set(opened.tensors().role) >= {"x_fwd", "g_dgrad", "x_wgrad"}
    assert not (opened.events()["kind"] == "error").any(), opened.events()["detail"].to_list()


def test_a_torch_that_is_too_old_is_refused_and_left_alone(tmp_path: Path):
    program = "import torch\ntorch.__version__ = '2.5.1'\n" + TRAINER
    with running(program, str(tmp_path / "losses.txt"), str(tmp_path / "stop")) as process:
        trainer = Trainer(process, tmp_path / "losses.txt")
        trainer.wait_for_steps(3)
        done = mxprobe("attach", trainer.pid, "-o", str(tmp_path / "run.mxprobe"), timeout_s=120)
        assert done.returncode == 4
        assert "runs torch 2.5; the agent needs 2.6 or newer" in done.stderr
        trainer.wait_for_steps(3)
        assert nothing_left(trainer.residue())
