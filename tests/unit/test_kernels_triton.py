"""The Triton kernels without a GPU: exact in the interpreter, and lean when compiled for the GPUs they are for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from mxprobe_kernels.formats import FORMATS, Rule
from mxprobe_kernels.recipe_grammar import Operand
from mxprobe_kernels.triton_backend import kernel_options, launch_options, lite_options
from mxprobe_kernels.triton_exact import exact_statistics
from mxprobe_kernels.triton_exact_backend import TILE_ELEMENTS, tile_rows
from mxprobe_kernels.triton_exact_backend import options as exact_options
from mxprobe_kernels.triton_kernels import full_statistics
from mxprobe_kernels.triton_lite import lite_statistics
from mxprobe_kernels.triton_policy import CHUNK, token_kernel
from mxprobe_kernels.triton_whatif import options as whatif_options
from mxprobe_kernels.triton_whatif_kernel import correction_errors
from tests.gpu_code import TARGETS, Code, compile_for

POINTERS = {torch.bfloat16: "*i16", torch.float16: "*fp16", torch.float32: "*fp32"}
# Instructions an element of the loop, at most: rows, columns, lite rows. A slower kernel fails here.
BUDGET = {
    "sm_80": {torch.bfloat16: (66, 79, 26), torch.float16: (65, 77, 24), torch.float32: (73, 80, 28)},
    "sm_90": {torch.bfloat16: (66, 78, 23), torch.float16: (64, 77, 21), torch.float32: (72, 78, 25)},
    "sm_100": {torch.bfloat16: (58, 70, 20), torch.float16: (56, 69, 18), torch.float32: (64, 71, 22)},
    "sm_120": {torch.bfloat16: (66, 79, 24), torch.float16: (65, 78, 22), torch.float32: (73, 80, 27)},
}


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
    assert _interpret("not slow") >= 70


@pytest.mark.slow
def test_interpreted_kernels_are_exact_under_every_rule():
    assert _interpret("slow") >= 5 * 23 + 11 * 21 + 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def _full(
    target: str, dtype: torch.dtype, columns: bool, rule: Rule = Rule.RCEIL, *, grouped: bool = False
) -> tuple[Code, float]:
    """Compiled code, and instructions an element of its loop. `grouped`: with offsets, an enable flag and masks."""
    constants = kernel_options(rule, dtype, columns, TARGETS[target].warp_size, grouped)
    signature = {
        "x_ptr": POINTERS[dtype],
        "amax_ptr": "*i32" if dtype == torch.float32 else "*i16",
        "part_ptr": "*fp64",
        "flag_ptr": "*i32",
        **dict.fromkeys(("n_rows", "n_columns", "stride_row", "blocks_per_row", "tiles_across"), "i32"),
    }
    optional = {"enabled_ptr": "*i32", "offsets_ptr": "*i64"}
    (signature if grouped else constants).update(optional if grouped else dict.fromkeys(optional))
    aligned = ("x_ptr", "amax_ptr", "part_ptr", "stride_row", "n_columns")
    options = launch_options(TARGETS[target].warp_size)
    code = compile_for(target, full_statistics, signature, constants, aligned, **options)
    return code, code.loop_instructions / (constants["RR"] * constants["V"])


def _lite(target: str, dtype: torch.dtype) -> tuple[Code, float]:
    constants = lite_options(Rule.RCEIL, dtype, TARGETS[target].warp_size, False)
    signature = {
        "x_ptr": POINTERS[dtype],
        "amax_ptr": "*i32",
        "part_ptr": "*fp64",
        "flag_ptr": "*i32",
        **dict.fromkeys(("n_rows", "n_columns", "stride_row", "n_tiles", "tiles_across"), "i32"),
    }
    aligned = ("x_ptr", "part_ptr", "stride_row", "n_columns")
    code = compile_for(target, lite_statistics, signature, {**constants, "enabled_ptr": None}, aligned)
    return code, code.loop_instructions / (constants["RR"] * constants["V"])


# Compilers before 3.9 pass a few sums of a program through shared memory when its loop is done.
SHARED_BYTES = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 256


def _is_lean(code: Code) -> None:
    assert (code.spills, code.flushes_subnormals) == (0, False)
    assert code.shared_bytes <= SHARED_BYTES
    assert code.loads
    assert all("128" in name or name.endswith("dwordx4") for name in code.loads), code.loads


DIRECTIONS = {"rows": False, "columns": True}
QUICK = [("sm_90", torch.bfloat16, "rows"), ("sm_90", torch.float32, "columns"), ("gfx942", torch.bfloat16, "rows")]
ALL = [(target, dtype, name) for target in TARGETS for dtype in POINTERS for name in DIRECTIONS]
CONFIGURATIONS = [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL]


@pytest.mark.parametrize(("target", "dtype", "direction"), CONFIGURATIONS)
def test_compiled_kernel_is_lean(target: str, dtype: torch.dtype, direction: str):
    code, per_element = _full(target, dtype, DIRECTIONS[direction])
    _is_lean(code)
    if target in BUDGET:
        assert 40 < per_element <= BUDGET[target][dtype][DIRECTIONS[direction]]


LITE = [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c[2] == "rows"]


@pytest.mark.parametrize(("target", "dtype", "direction"), LITE)
def test_lite_kernel_is_leaner(target: str, dtype: torch.dtype, direction: str):
    code, per_element = _lite(target, dtype)
    _is_lean(code)
    if target in BUDGET:
        assert 10 < per_element <= BUDGET[target][dtype][2]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("rule", [Rule.FLOOR, Rule.FLOOR_DIV], ids=str)
def test_rules_that_saturate_do_not_spill_either(target: str, rule: Rule):
    for dtype in POINTERS:
        for columns in (False, True):
            code, _ = _full(target, dtype, columns, rule)
            _is_lean(code)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_experts_in_one_launch_do_not_spill_either(target: str):
    for columns in (False, True):
        code, _ = _full(target, torch.bfloat16, columns, grouped=True)
        assert (code.spills, code.flushes_subnormals) == (0, False)
        assert code.shared_bytes <= SHARED_BYTES
        # beside the flag and two offsets, which are single numbers
        assert any("128" in name or name.endswith("dwordx4") for name in code.loads), code.loads


def _stack(format: str) -> int:
    """Bytes and instructions of stack that are let pass: trying two scales divides in a subroutine of ptxas's, and a
    scale of the tensor leaves a double too few registers (22 on sm_90, 60 on sm_120)."""
    return 64 if format == "nvfp4" else 16 if "4over6" in format else 0


def _exact(target: str, format: str) -> Code:
    rows = tile_rows(FORMATS[format], torch.device("cuda"))
    constants = exact_options(FORMATS[format], Rule.RCEIL, torch.bfloat16, rows)
    scaled = FORMATS[format].tensor_scale
    signature = {
        "x_ptr": "*i16",
        "amax_ptr": "*i32",
        "scale_ptr": "*fp64",
        "part_ptr": "*fp64",
        "flag_ptr": "*i32",
        **({"unit_ptr": "*fp64"} if scaled else {}),
        **dict.fromkeys(("n_rows", "n_columns", "stride_row", "blocks_per_row"), "i32"),
    }
    fixed = {
        "offsets_ptr": None,
        "stride_column": 1,
        "GROUPED_COLUMNS": False,
        **({} if scaled else {"unit_ptr": None}),
    }
    aligned = ("x_ptr", "part_ptr", "stride_row", "n_columns")
    return compile_for(target, exact_statistics, signature, {**constants, **fixed}, aligned, enable_fp_fusion=False)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
def test_float64_kernels_do_not_spill(target: str):
    for format in FORMATS:
        code = _exact(target, format)
        assert code.spills <= _stack(format), format
        assert not code.flushes_subnormals


def _whatif(target: str, correction: str) -> Code:
    constants = whatif_options(Operand.from_correction(correction), torch.bfloat16, TILE_ELEMENTS)
    optional = {"unit_ptr": "nvfp4", "signs_ptr": "had", "alpha_ptr": "of"}
    used = {name: "*fp32" if name == "signs_ptr" else "*fp64" for name, of in optional.items() if of in correction}
    signature = {
        "x_ptr": "*i16",
        "part_ptr": "*fp64",
        **used,
        **dict.fromkeys(("n_rows", "n_columns", "stride_row"), "i32"),
    }
    unused = dict.fromkeys(name for name in optional if name not in used)
    aligned = ("x_ptr", "part_ptr", "stride_row", "n_columns")
    return compile_for(
        target,
        correction_errors,
        signature,
        {**constants, **unused, "stride_column": 1},
        aligned,
        enable_fp_fusion=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_whatif_kernels_do_not_spill(target: str):
    for correction in ("rule:even", "mbs:128", "mbs:256", "of:0.5", "had:32", "sr", "nvfp4_4over6", "hif4", "mxfp8"):
        code = _whatif(target, correction)
        assert code.spills <= _stack(correction), correction
        assert not code.flushes_subnormals


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_policy_kernel_compiles(target: str):
    signature = {
        "logits_ptr": "*bf16",
        "tokens_ptr": "*i64",
        "log_prob_ptr": "*fp32",
        "entropy_ptr": "*fp32",
        "width": "i32",
        "stride_row": "i32",
        "temperature": "fp32",
    }
    constants = {"CHUNK": CHUNK, "stride_column": 1}
    aligned = ("logits_ptr", "stride_row", "width")
    code = compile_for(target, token_kernel, signature, constants, aligned, num_warps=4)
    assert code.spills == 0
    assert any("128" in name or name.endswith("dwordx4") for name in code.loads), code.loads


@pytest.mark.slow
def test_an_older_triton_makes_as_lean_loops(tmp_path: Path):
    """The quick ones for sm_90, budgets included, by triton 3.4.0 in its own process; AMD's want a linker of ROCm."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), "triton==3.4.0"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("triton 3.4.0 cannot be installed here")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    run += ["tests/unit/test_kernels_triton.py", "-k", "(kernel_is_lean or kernel_is_leaner) and sm_90"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(run, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "3 passed" in done.stdout
