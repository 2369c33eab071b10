"""The agent as one file: a zip of the shipped modules, from which the loader imports them inside the process."""

import marshal
import os
import zipfile
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

import mxprobe
import mxprobe_kernels

_TOP_LEVEL = ("__init__", "_version", "schema", "tables", "events", "protocol", "errors", "declaration")
EMULATION = (
    *("__init__", "api", "attention", "automatic", "control", "linear", "modules", "quantizer", "recipe"),
    "selection",
)
"""Shipped, and loaded only when `mxprobe set` asks for it: importing it registers an operator with torch."""

_CPU_LIBRARY = "libmxprobe_cpu.so"
"""The compiled CPU kernels, where they were built; `mxprobe_kernels.cpu_backend` looks for them under this name."""


def shipped_files() -> dict[str, bytes]:
    """Return path in the archive -> source: the shipped modules, the agent, and the torch path of the kernels."""
    return {name: path.read_bytes() for name, path in _shipped_paths().items()}


def _shipped_paths() -> dict[str, Path]:
    probe = Path(mxprobe.__file__).parent
    kernels = Path(mxprobe_kernels.__file__).parent
    paths = [probe / f"{name}.py" for name in _TOP_LEVEL]
    for folder in ("agent", "measuring"):
        paths += sorted((probe / folder).rglob("*.py"))
    paths += [probe / "emulation" / f"{name}.py" for name in EMULATION]
    shipped = {f"mxprobe/{path.relative_to(probe).as_posix()}": path for path in paths}
    return shipped | {f"mxprobe_kernels/{name}.py": kernels / f"{name}.py" for name in mxprobe_kernels.SHIPPED_MODULES}


def write_archive(path: Path, files: Mapping[str, bytes] | None = None) -> None:
    """Write the archive, readable by its owner only; FileExistsError if anything is there already.

    It is stored, not compressed: an interpreter built without zlib can read it. `modules.txt` lists the modules to
    import at once where torch is there, so that nothing is read from disk in the middle of a training step. Beside
    our own sources lies what this interpreter compiled of them: one of the same version does not compile them again.
    """
    members = dict(shipped_files() if files is None else files)
    members["loader.py"] = Path(__file__).with_name("loader.py").read_bytes()
    library = Path(mxprobe_kernels.__file__).parent / "cpu" / _CPU_LIBRARY
    if library.exists():
        members[_CPU_LIBRARY] = library.read_bytes()
    members["version.txt"] = mxprobe.__version__.encode()
    at_once = sorted(_module_name(name) for name in members if "/" in name and not _is_optional(name))
    members["modules.txt"] = "\n".join(at_once).encode()
    if files is None:
        members |= {f"{name}c": _compiled(name, path, members[name]) for name, path in _shipped_paths().items()}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _compiled(name: str, path: Path, source: bytes) -> bytes:
    """Return a `.pyc` with the hash of its source, which interpreters do not compare unless they are told to."""
    code = SourceFileLoader(_module_name(name), str(path)).get_code(_module_name(name))
    is_by_hash = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + is_by_hash + source_hash(source) + marshal.dumps(code)


def _is_optional(path: str) -> bool:
    return path.startswith("mxprobe/emulation/")


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
