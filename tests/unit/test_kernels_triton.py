"""The Triton kernels without a GPU: exact in the interpreter, and lean when compiled for the GPUs they are for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mxprobe_kernels.formats import MXFP4, Rule
from mxprobe_kernels.triton_backend import kernel_options, lite_tile_shape, tile_shape
from mxprobe_kernels.triton_kernels import LITE_SLOTS, full_statistics, lite_statistics
from tests.gpu_code import TARGETS, compile_for

POINTERS = {torch.bfloat16: "*i16", torch.float16: "*fp16", torch.float32: "*fp32"}
# Instructions an element of the loop on sm_90, at most. A slower kernel fails here.
BUDGET = {
    (torch.bfloat16, "rows"): 73,
    (torch.float16, "rows"): 73,
    (torch.float32, "rows"): 92,
    (torch.bfloat16, "columns"): 87,
    (torch.float16, "columns"): 86,
    (torch.float32, "columns"): 102,
}
LITE_BUDGET = {torch.bfloat16: 26, torch.float16: 25, torch.float32: 29}


def _interpret(markers: str) -> int:
    """Run the interpreted suite in its own process; the number of tests that passed."""
    root = Path(__file__).parents[2]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run.append("tests/unit/interpreted_triton.py")
    done = subprocess.run(run, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    return int(passed[1])


def test_interpreted_kernels_are_exact():
    assert _interpret("not slow") >= 23 + 18


@pytest.mark.slow
def test_interpreted_kernels_are_exact_under_every_rule():
    assert _interpret("slow") >= 5 * 23 + 11 * 18


def _compile(target: str, dtype: torch.dtype, columns: bool, rule: Rule = Rule.RCEIL):
    lanes = TARGETS[target].warp_size
    integers = ("n_rows", "n_columns", "stride_row", "blocks_per_row", "n_tiles", "tiles_across", "n_programs")
    signature = {
        "x_ptr": POINTERS[dtype],
        "amax_ptr": "*i32" if dtype == torch.float32 else "*i16",
        "part_ptr": "*fp64",
        **dict.fromkeys(integers, "i32"),
    }
    aligned = ("x_ptr", "amax_ptr", "part_ptr", "stride_row", "n_columns")
    return compile_for(target, full_statistics, signature, kernel_options(rule, dtype, columns, lanes, False), aligned)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


DIRECTIONS = {"rows": False, "columns": True}
QUICK = [("sm_90", torch.bfloat16, "rows"), ("sm_90", torch.float32, "columns"), ("gfx942", torch.bfloat16, "rows")]
ALL = [(target, dtype, name) for target in TARGETS for dtype in POINTERS for name in DIRECTIONS]
CONFIGURATIONS = [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL]


@pytest.mark.parametrize(("target", "dtype", "direction"), CONFIGURATIONS)
def test_compiled_kernel_is_lean(target: str, dtype: torch.dtype, direction: str):
    code = _compile(target, dtype, DIRECTIONS[direction])
    assert code.spills == 0
    assert code.shared_bytes == 0
    assert not code.flushes_subnormals
    assert code.loads
    assert all("128" in name or name.endswith("dwordx4") for name in code.loads), code.loads
    if target == "sm_90":
        tile = tile_shape(dtype.itemsize, DIRECTIONS[direction], 32, covers=True)
        per_element = code.loop_instructions / (tile["RR"] * tile["V"])
        assert 40 < per_element <= BUDGET[dtype, direction]


LITE = [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c[2] == "rows"]


@pytest.mark.parametrize(("target", "dtype", "direction"), LITE)
def test_lite_kernel_is_leaner(target: str, dtype: torch.dtype, direction: str):
    tile = lite_tile_shape(dtype.itemsize, TARGETS[target].warp_size)
    constants = {
        "BIAS": MXFP4.amax_bias(Rule.RCEIL),
        "COVERS": True,
        "MASK": False,
        "BF16": dtype == torch.bfloat16,
        "N_SLOTS": LITE_SLOTS,
        **tile,
    }
    integers = ("n_rows", "n_columns", "stride_row", "n_tiles", "tiles_across", "n_programs")
    signature = {"x_ptr": POINTERS[dtype], "amax_ptr": "*i32", "part_ptr": "*fp64", **dict.fromkeys(integers, "i32")}
    aligned = ("x_ptr", "part_ptr", "stride_row", "n_columns")
    code = compile_for(target, lite_statistics, signature, constants, aligned)
    assert (code.spills, code.shared_bytes, code.flushes_subnormals) == (0, 0, False)
    assert all("128" in name or name.endswith("dwordx4") for name in code.loads), code.loads
    if target == "sm_90":
        assert 10 < code.loop_instructions / (tile["RR"] * tile["V"]) <= LITE_BUDGET[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("rule", [Rule.FLOOR, Rule.FLOOR_DIV], ids=str)
def test_rules_that_saturate_do_not_spill_either(target: str, rule: Rule):
    for dtype in POINTERS:
        for columns in (False, True):
            code = _compile(target, dtype, columns, rule)
            assert (code.spills, code.shared_bytes) == (0, 0)
