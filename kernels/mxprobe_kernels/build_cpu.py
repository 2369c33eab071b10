"""Compile the C++ CPU kernels: by the wheel's build hook, or by hand with `python -m mxprobe_kernels.build_cpu`.

One object per instruction set and one that dispatches, linked into a library that needs neither torch nor Python.
Without a compiler nothing is built and the torch path serves. Standard library only: the build environment has
no more.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
LIBRARY = SOURCES / "libmxprobe_cpu.so"

# Non-finite blocks never reach the arithmetic and signs are handled as bits, so min and max may be single instructions.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-ffinite-math-only", "-fno-signed-zeros")
X86_ISAS = {
    "avx512": (16, ("-march=x86-64-v4", "-mprefer-vector-width=512")),
    "avx2": (8, ("-march=x86-64-v3",)),
    "baseline": (4, ()),
}
OTHER_ISAS = {"baseline": (4, ())}


def find_compiler() -> str | None:
    """Return $CXX, else the first of the usual compilers on the path; None without one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def is_fresh(library: Path = LIBRARY) -> bool:
    """Return whether the library is newer than all of its sources."""
    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.hpp"), *SOURCES.glob("*.inc"), Path(__file__)]
    return library.exists() and all(library.stat().st_mtime > source.stat().st_mtime for source in sources)


def compile_library(compiler: str, library: Path = LIBRARY) -> None:
    """Build the library in place of an older one. CalledProcessError with the compiler's words when it cannot."""
    isas = X86_ISAS if platform.machine() in ("x86_64", "AMD64") else OTHER_ISAS
    with tempfile.TemporaryDirectory() as scratch:
        jobs: dict[str, tuple[str, ...]] = {"dispatch": (compiler, *FLAGS, "-c", str(SOURCES / "dispatch.cpp"))}
        for isa, (lanes, flags) in isas.items():
            defines = (f"-DISA={isa}", f"-DLANES={lanes}")
            for source in ("statistics", "quantize"):
                jobs[f"{isa}_{source}"] = (compiler, *FLAGS, *flags, *defines, "-c", str(SOURCES / f"{source}.cpp"))
        objects = [f"{scratch}/{name}.o" for name in jobs]
        running = [
            subprocess.Popen((*job, "-o", target), stderr=subprocess.PIPE, text=True)
            for job, target in zip(jobs.values(), objects, strict=True)
        ]
        words = [process.communicate()[1] for process in running]
        for process, said in zip(running, words, strict=True):
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, stderr=said)
        linked = Path(scratch) / library.name
        link = (compiler, "-shared", "-pthread", *objects, "-o", str(linked))
        subprocess.run(link, check=True, capture_output=True, text=True)
        shutil.move(linked, library)


def instruction_sets(library: Path = LIBRARY) -> str:
    """Return the instruction sets of the built library that this machine runs, comma-separated, best first.

    "" where no library can be loaded.
    """
    try:
        loaded = ctypes.CDLL(str(library))
        loaded.mxprobe_isas.restype = ctypes.c_char_p
        return loaded.mxprobe_isas().decode()
    except (OSError, AttributeError):
        return ""


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        print("no C++ compiler found: install g++ or set CXX; until then the torch path is used", file=sys.stderr)
        return 1
    try:
        compile_library(compiler)
    except subprocess.CalledProcessError as error:
        print(f"{compiler} could not build the CPU kernels; the torch path is used\n{error.stderr}", file=sys.stderr)
        return 1
    print(LIBRARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
