"""The C++ kernels: every instruction set of this machine against the shared cases, and the build that makes them."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from mxprobe.attach.archive import write_archive
from mxprobe_kernels import build_cpu, cpu_backend, decompose, lite, torch_backend
from mxprobe_kernels.columns import COUNTS, ENERGY_SUMS
from mxprobe_kernels.formats import FORMATS, MXFP4, NVFP4, Format, Rule
from tests.cases import Case, disagreements, golden_cases, hard_tensors

ROOT = Path(__file__).parents[2]
built = pytest.mark.skipif(cpu_backend.library() is None, reason="no compiler when mxprobe was installed")
ISAS = cpu_backend.isas() or ("none",)


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", golden_cases(), ids=lambda c: c.name)
def test_golden_case(case: Case, isa: str):
    for rule in Rule:
        measured = cpu_backend.decompose(case.x, MXFP4, rule, -1, isa=isa).to_dict()
        assert disagreements(measured, case.rules[rule.value], rtol=1e-6) == []


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "x"), hard_tensors(), ids=lambda v: v if isinstance(v, str) else "")
def test_hard_tensor(name: str, x: torch.Tensor, isa: str):
    for rule in Rule:
        for dim in (0, 1):
            measured = cpu_backend.decompose(x, MXFP4, rule, dim, isa=isa).to_dict()
            expected = torch_backend.decompose(x, MXFP4, rule, dim).to_dict()
            assert disagreements(measured, expected, rtol=1e-6) == [], (rule, dim)


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_elements_have_the_codes_of_float64(dtype: torch.dtype, isa: str):
    """Scales that differ from row to row; ragged in both directions."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(515, 1003, generator=g) * torch.exp2(torch.randint(-9, 9, (515, 1), generator=g))
    for i, rule in enumerate(Rule):
        measured = cpu_backend.decompose(x.to(dtype), MXFP4, rule, i % 2, isa=isa).to_dict()
        assert disagreements(measured, torch_backend.decompose(x.to(dtype), MXFP4, rule, i % 2).to_dict(), 1e-6) == []


@built
@pytest.mark.parametrize("isa", ISAS)
def test_lite_is_a_part_of_the_decomposition(isa: str):
    for name, x in hard_tensors():
        for rule, dim in ((Rule.RCEIL, 1), (Rule.FLOOR, 0)):
            part = cpu_backend.lite(x, MXFP4, rule, dim, isa=isa).to_dict()
            whole = torch_backend.decompose(x, MXFP4, rule, dim).to_dict()
            assert disagreements(part, {key: whole[key] for key in part}, rtol=1e-6) == [], (name, rule, dim)


@built
def test_lite_of_every_backend():
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(7))
    for dim in (0, 1):
        by_default, plain = lite(x, dim=dim).to_dict(), lite(x, dim=dim, backend="torch").to_dict()
        assert list(by_default) == ["sum_x2", "sum_e2", "n_zeroed", "n_saturated", "n_nonfinite", "amax"]
        assert disagreements(by_default, plain, rtol=1e-6) == []
    assert lite(x[:0]).to_dict()["sum_x2"] == 0


@built
def test_narrow_rows_are_measured_as_one_long_row():
    """Rows of two blocks that lie end to end, and the same rows apart, give the same to rounding."""
    wide = torch.randn(300, 128, generator=torch.Generator().manual_seed(8))
    apart, together = wide[:, :64], wide[:, :64].contiguous()
    one = cpu_backend.decompose(apart, MXFP4, Rule.RCEIL, 1).to_dict()
    assert disagreements(cpu_backend.decompose(together, MXFP4, Rule.RCEIL, 1).to_dict(), one, rtol=1e-6) == []


@built
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_every_format(format: Format):
    """In double, and by the same operations as the torch path: codes, counts and histograms exact, sums to 1e-12."""
    for i, (name, x) in enumerate(hard_tensors()):
        isa, rule, dim = ISAS[i % len(ISAS)], (Rule.RCEIL, Rule.FLOOR)[i % 2], i // 2 % 2
        measured = cpu_backend.decompose(x, format, rule, dim, isa=isa).to_dict()
        expected = torch_backend.decompose(x, format, rule, dim).to_dict()
        assert disagreements(measured, expected, 1e-6 if format == MXFP4 else 1e-12) == [], (name, isa)


@built
@pytest.mark.slow
def test_a_hundred_million_elements():
    """0 differing counts and histograms, sums within 1e-6, over dtypes, scales, rules and directions, on every ISA."""
    g = torch.Generator().manual_seed(2)
    seen = 0
    for i in range(48):
        x = torch.randn(1024, 2048, generator=g) * 2.0 ** (8 * (i % 5) - 16)
        x = x.to((torch.float32, torch.bfloat16, torch.float16)[i % 3])
        rule, dim = list(Rule)[i // 3 % 6], i // 18 % 2
        expected = torch_backend.decompose(x, MXFP4, rule, dim).to_dict()
        for isa in ISAS:
            measured = cpu_backend.decompose(x, MXFP4, rule, dim, isa=isa).to_dict()
            assert disagreements(measured, expected, 1e-6) == [], (isa, x.dtype, rule, dim)
        seen += x.numel()
    assert seen > 1e8


@built
def test_the_number_of_threads_changes_no_bit():
    x = torch.randn(700, 3000, generator=torch.Generator().manual_seed(3))
    for dim in (0, 1):
        one = cpu_backend.decompose(x, MXFP4, Rule.RCEIL, dim, n_threads=1).values
        for n in (2, 3, 8):
            assert torch.equal(cpu_backend.decompose(x, MXFP4, Rule.RCEIL, dim, n_threads=n).values, one)


@built
def test_small_blocks_beside_large_ones_keep_their_error():
    """Scales of neighbouring blocks lie 2^200 apart, and the large ones are exact: all of the error is small."""
    x = torch.full((64, 96), 6.0 * 2.0**100)
    x[:, 32:64] = torch.randn(64, 32, generator=torch.Generator().manual_seed(4)) * 2.0**-100
    for view, dim in ((x, 1), (x.t().contiguous(), 0)):
        measured = cpu_backend.decompose(view, MXFP4, Rule.RCEIL, dim).to_dict()
        assert 0 < measured["sum_e2"] < 2.0**-180
        assert disagreements(measured, torch_backend.decompose(view, MXFP4, Rule.RCEIL, dim).to_dict(), 1e-6) == []


@built
def test_flushing_subnormals_does_not_reach_the_kernel():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)) * 1e-39
    expected = cpu_backend.decompose(x, MXFP4, Rule.RCEIL, 1).values
    torch.set_flush_denormal(True)
    try:
        measured = cpu_backend.decompose(x, MXFP4, Rule.RCEIL, 1).values
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(measured, expected)
    assert expected[0] > 0


@built
def test_it_is_what_auto_picks_on_a_cpu():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(6))
    assert torch.equal(decompose(x).values, decompose(x, backend="cpu").values)
    assert decompose(x[:0]).n == 0


@built
def test_what_it_cannot_take_is_answered_in_words():
    x = torch.ones(1, 32)
    with pytest.raises(ValueError, match="no kernel for instruction set 'mmx' here; known: "):
        cpu_backend.decompose(x, MXFP4, Rule.RCEIL, 1, isa="mmx")
    with pytest.raises(ValueError, match="no kernel for instruction set 'mmx' here; known: "):
        cpu_backend.decompose(x, NVFP4, Rule.RCEIL, 1, isa="mmx")
    with pytest.raises(ValueError, match="use backend='torch'"):
        cpu_backend.decompose(x.to("meta"), NVFP4, Rule.RCEIL, 1)


SHIPPED = """
import gc, sys, torch
sys.path.insert(0, {tests!r})
from mxprobe.attach import loader
for name in [name for name in sys.modules if name.partition(".")[0] in ("mxprobe", "mxprobe_kernels")]:
    if name not in ("mxprobe.attach.loader",):
        del sys.modules[name]
loader._load_package({archive!r}, "mxprobe_kernels")
import mxprobe_kernels
import mxprobe_kernels.cpu_backend as backend
assert backend.__file__.startswith({archive!r}), backend.__file__
print(len(backend.isas()), float(mxprobe_kernels.decompose(torch.full((2, 32), 5.0)).sum_e2))
print("memfd:mxprobe" in open("/proc/self/maps").read())
loader._unload({archive!r})
del backend, mxprobe_kernels
gc.collect()
print("memfd:mxprobe" in open("/proc/self/maps").read())
"""


@built
def test_the_agent_takes_the_library_along_and_leaves_nothing_mapped(tmp_path: Path):
    archive = tmp_path / "agent.zip"
    write_archive(archive)
    program = SHIPPED.format(archive=str(archive), tests=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{len(ISAS)} 64.0", "True", "False"]


def test_values_are_in_the_order_of_the_columns():
    """The enumeration in statistics.hpp is `columns` in C++ spelling."""
    header = (build_cpu.SOURCES / "statistics.hpp").read_text()
    found = re.search(r"enum : int \{(.*?)kAmax", header, re.S)
    assert found
    spelled = [name.lower() for name in re.findall(r"k(\w+)", found[1])]
    names = [*(n.removeprefix("sum_") for n in ENERGY_SUMS), *(n.removeprefix("n_") for n in COUNTS)]
    assert spelled == [name.replace("_", "") for name in names]


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build_cpu.find_compiler() is None
    assert build_cpu.main() == 1
    assert "the torch path is used" in capsys.readouterr().err


def test_doctor_says_whether_there_is_a_library(tmp_path: Path):
    assert build_cpu.instruction_sets().split(",") == list(cpu_backend.isas() or ("",))
    assert build_cpu.instruction_sets(tmp_path / "none.so") == ""


def test_a_compiler_that_fails_leaves_no_library(tmp_path: Path):
    library = tmp_path / "lib.so"
    with pytest.raises(subprocess.CalledProcessError):
        build_cpu.compile_library(shutil.which("false") or "false", library)
    assert not library.exists()


@pytest.mark.slow
def test_the_wheel_builds_without_a_compiler(tmp_path: Path):
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("mxprobe", "kernels", "reports"):
        shutil.copytree(ROOT / name, tmp_path / "src" / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path / "src" / name)
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent), "CXX": ""}
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(tmp_path / "src")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
