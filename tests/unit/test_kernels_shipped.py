"""The modules that travel into the user's process: Python 3.9 syntax, standard library and torch, lazily."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mxprobe_kernels
from mxprobe_kernels import SHIPPED_MODULES

HOME = Path(mxprobe_kernels.__file__).parent


@pytest.mark.parametrize("module", SHIPPED_MODULES)
def test_compiles_as_python_3_9(module: str):
    ast.parse((HOME / f"{module}.py").read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("module", SHIPPED_MODULES)
def test_no_union_operator_is_evaluated(module: str):
    """`X | Y` between types may stand in annotations, which stay strings; evaluated, it needs Python 3.10."""
    tree = ast.parse((HOME / f"{module}.py").read_text())
    uses_unions = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) for node in ast.walk(tree))
    lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    assert lazy or not uses_unions


def _in_a_bare_process(shipped: Path, code: str) -> str:
    blocked = "import sys\nfor name in ('numpy', 'triton', 'mxprobe'): sys.modules[name] = None\n"
    run = [sys.executable, "-W", "error", "-c", f"{blocked}sys.path.insert(0, {str(shipped)!r})\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    (tmp_path / "mxprobe_kernels").mkdir()
    for module in SHIPPED_MODULES:
        (tmp_path / "mxprobe_kernels" / f"{module}.py").write_text((HOME / f"{module}.py").read_text())
    return tmp_path


def test_formats_need_no_torch(shipped: Path):
    code = "from mxprobe_kernels.formats import FORMATS; print('torch' in sys.modules, len(FORMATS) > 0)"
    assert _in_a_bare_process(shipped, code) == "False True"


def test_the_shipped_files_alone_decompose_and_correct(shipped: Path):
    code = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch speaks of the numpy that is kept from it here
    import torch
import mxprobe_kernels as k
x = torch.arange(64.0).reshape(2, 32)
d = k.decompose(x)
k.error_fields(x).decomposition()
k.apply_correction(x, "mbs:32")
print(k.__file__.startswith(sys.path[0]), d.n, d.sum_x2)
"""
    assert _in_a_bare_process(shipped, code) == "True 64 85344.0"


def test_unknown_attributes_are_reported_as_such():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mxprobe_kernels.nothing
