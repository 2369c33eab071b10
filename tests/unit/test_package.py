"""What the built distribution holds, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_top_level_names(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    packages = {name for name in top if not name.endswith(".dist-info")}
    assert packages == {"mxprobe", "mxprobe_kernels", "mxprobe_reports"}


def test_wheel_holds_every_module_table_and_marker(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {
        "mxprobe": ROOT / "mxprobe",
        "mxprobe_kernels": ROOT / "kernels/mxprobe_kernels",
        "mxprobe_reports": ROOT / "reports/mxprobe_reports",
    }
    for package, directory in sources.items():
        assert f"{package}/py.typed" in names
        for kind in ("*.py", "*.toml", "*.html", "*.js", "*.css"):
            for file in directory.rglob(kind):
                assert f"{package}/{file.relative_to(directory)}" in names


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert "Requires-Python: >=3.11" in text
    for requirement in ("torch", "triton", "pandas", "pyarrow", "plotly", "jinja2", "rich", "click"):
        assert f"Requires-Dist: {requirement}" in text
    for extra in ("trl", "ray", "duckdb", "exporters"):
        assert f"Provides-Extra: {extra}" in text
    (scripts,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "mxprobe = mxprobe.cli:main" in wheel.read(scripts).decode()


def test_no_package_shadows_a_public_one() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "reports/__init__.py").exists()


@pytest.mark.parametrize("package", ["mxprobe.trace", "mxprobe.attribution", "mxprobe_reports"])
def test_reading_a_trace_needs_no_torch(package: str) -> None:
    code = f"import sys, {package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
