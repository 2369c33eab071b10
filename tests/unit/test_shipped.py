"""What travels into the user's process: Python 3.9 syntax, standard library and torch, nothing else."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mxprobe
import mxprobe_kernels
from mxprobe.attach.archive import EMULATION

PACKAGE = Path(mxprobe.__file__).parent
KERNELS = Path(mxprobe_kernels.__file__).parent
SHIPPED = [
    *(
        PACKAGE / f"{name}.py"
        for name in (
            "__init__",
            "_version",
            "schema",
            "tables",
            "events",
            "protocol",
            "listener",
            "errors",
            "declaration",
        )
    ),
    *sorted((PACKAGE / "agent").rglob("*.py")),
    *sorted((PACKAGE / "measuring").rglob("*.py")),
    *(PACKAGE / "emulation" / f"{name}.py" for name in EMULATION),
    *(KERNELS / f"{name}.py" for name in mxprobe_kernels.SHIPPED_MODULES),
]
STANDARD_LIBRARY_ONLY = ("mxprobe", "mxprobe.schema", "mxprobe.protocol", "mxprobe.listener", "mxprobe.agent.boot")
MAY_IMPORT = {*sys.stdlib_module_names, "torch", "mxprobe", "mxprobe_kernels"}
NEWER_THAN_3_9 = {"tomllib", "TypeAlias", "ParamSpec", "TypeGuard", "StrEnum", "pairwise", "Self", "assert_never"}


def module_name(path: Path) -> str:
    root = PACKAGE.parent if PACKAGE in path.parents else KERNELS.parent
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("path", SHIPPED, ids=module_name)
def test_it_is_python_3_9_and_imports_nothing_else(path: Path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.name == "__init__.py", "relative"
            tops = {(node.module or "").split(".")[0]} if node.level == 0 else set()
            assert not NEWER_THAN_3_9 & {alias.name for alias in node.names}
        else:
            continue
        assert tops <= MAY_IMPORT, f"line {node.lineno} imports {tops - MAY_IMPORT}"


def run(code: str, *arguments: str, python: str = sys.executable) -> str:
    command = [python, "-I", "-B", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_agent_loads_with_torch_alone():
    """Everything but the standard library, torch and what torch itself brings is out of reach."""
    code = """
import sys, importlib
import torch, torch.nn.utils.parametrize, torch.utils.checkpoint
known = {name.split(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
sys.path[:0] = sys.argv[1:3]
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in known | {"mxprobe", "mxprobe_kernels", "triton"}:
            raise AssertionError(name)
sys.meta_path.insert(0, Forbid())
for name in sys.argv[3:]:
    importlib.import_module(name)
"""
    run(code, str(PACKAGE.parent), str(KERNELS.parent), *map(module_name, SHIPPED))


def test_the_way_in_does_not_import_torch():
    code = """
import sys, importlib
sys.path[:0] = sys.argv[1:3]
for name in sys.argv[3:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""
    run(code, str(PACKAGE.parent), str(KERNELS.parent), *STANDARD_LIBRARY_ONLY)


def python_3_9() -> str | None:
    versions = sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python3.9"))
    for candidate in (*map(str, versions), shutil.which("python3.9")):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.mark.skipif(python_3_9() is None, reason="no Python 3.9 on this machine; the syntax is checked above")
def test_a_real_python_3_9_runs_what_needs_no_torch():
    code = """
import sys, importlib
sys.path[:0] = sys.argv[1:3]
for name in sys.argv[3:]:
    importlib.import_module(name)
from mxprobe.protocol import AgentConfig
assert AgentConfig.from_json(AgentConfig().to_json()) == AgentConfig()
"""
    python = python_3_9()
    assert python is not None
    run(code, str(PACKAGE.parent), str(KERNELS.parent), *STANDARD_LIBRARY_ONLY, python=python)
