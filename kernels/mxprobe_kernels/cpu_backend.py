"""The C++ kernels for CPUs, loaded with ctypes where the build found a compiler. Shipped.

The library links neither torch nor Python. It holds one kernel per instruction set and picks the best the machine
runs; its sums do not depend on the number of threads.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from mxprobe_kernels.blocks import rows_of
from mxprobe_kernels.decomposition import N_VALUES, Decomposition, empty
from mxprobe_kernels.formats import MXFP4, Format, Rule
from mxprobe_kernels.lite_statistics import Lite, from_decomposition

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cpu", "libmxprobe_cpu.so")
SHIPPED_LIBRARY = "libmxprobe_cpu.so"
"""Its name in the archive that an agent is loaded from, where the controller has it."""

_INTERFACE = 3
"""Of dispatch.cpp: an older library beside newer Python is not used."""

_LOADER: Any = __spec__.loader if __spec__ else None

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Library(ctypes.CDLL):
    """Unmapped with the last reference to it: an agent that leaves a process leaves nothing mapped there."""

    def __del__(self, _close: Callable[[int], None] = _ctypes.dlclose) -> None:
        handle = self.__dict__.get("_handle", 0)
        if handle:
            _close(handle)


def _load() -> ctypes.CDLL:
    """The library beside this file, or the one in the archive that this module was imported from. OSError for none."""
    archive = getattr(_LOADER, "archive", None)
    if archive is None:
        return _Library(LIBRARY)
    data = _LOADER.get_data(os.path.join(archive, SHIPPED_LIBRARY))
    with os.fdopen(os.memfd_create("mxprobe", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        # By a thread of this process: a debugger opens the paths of all libraries, and /proc/self/fd/N would be one of
        # its own descriptors. gdb waits for ever where that is a pipe.
        return _Library(f"/proc/self/task/{threading.get_native_id()}/fd/{file.fileno()}")


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where none was built, or it is of another version or machine."""
    try:
        loaded = _load()
        loaded.mxprobe_isas.restype = ctypes.c_char_p
        pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        loaded.mxprobe_statistics.argtypes = [pointer, i32, i64, i64, i64, *[i32] * 5, ctypes.c_char_p, pointer]
        loaded.mxprobe_quantize.argtypes = [
            *(pointer, i64, i32, i32, i32, ctypes.c_double, i32, i32, ctypes.c_double, i32),
            *(ctypes.c_char_p, pointer, pointer),
        ]
        current = loaded.mxprobe_interface() == _INTERFACE and loaded.mxprobe_values() == N_VALUES
        return loaded if current else None
    except (OSError, AttributeError):
        return None


def isas() -> tuple[str, ...]:
    """Instruction sets that the library has kernels for and this machine runs, best first; empty without a library."""
    loaded = library()
    return tuple(loaded.mxprobe_isas().decode().split(",")) if loaded else ()


def supports(x: torch.Tensor, format: Format) -> bool:
    return x.device.type == "cpu" and format == MXFP4 and library() is not None


@torch.no_grad()
def decompose(
    x: torch.Tensor, format: Format, rule: Rule, dim: int, *, isa: str = "", n_threads: int | None = None
) -> Decomposition:
    """As `torch_backend.decompose`; sums within 1e-6 of float64, codes, counts and histograms exact.

    `isa`: one of `isas()`, the best by default. `n_threads`: torch's own number by default; the result is the same.
    ValueError where there is no library, or no such instruction set.
    """
    return Decomposition(_statistics(x, format, rule, dim, False, isa, n_threads), format.name, rule.value)


@torch.no_grad()
def lite(x: torch.Tensor, format: Format, rule: Rule, dim: int, *, isa: str = "", n_threads: int | None = None) -> Lite:
    """The always-on statistics at about three times the rate of `decompose`; everything else as there."""
    values = _statistics(x, format, rule, dim, True, isa, n_threads)
    return from_decomposition(Decomposition(values, format.name, rule.value))


def _statistics(
    x: torch.Tensor, format: Format, rule: Rule, dim: int, lite: bool, isa: str, n_threads: int | None
) -> torch.Tensor:
    """float64 [N_VALUES]; under `lite` those that `Lite` is made of, zeros elsewhere."""
    loaded = library()
    if loaded is None or not supports(x, format):
        raise ValueError("the CPU kernels were not built, or cannot take this tensor or format; use backend='torch'")
    rows = rows_of(x, dim)
    values = empty(x.device)
    if not rows.numel():
        return values
    if rows.dtype == torch.float64:
        rows = rows.float()
    columns = rows.stride(0) == 1 and rows.stride(1) != 1
    matrix = rows.t() if columns else rows
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    failed = loaded.mxprobe_statistics(
        matrix.data_ptr(),
        _DTYPES[matrix.dtype],
        matrix.shape[0],
        matrix.shape[1],
        matrix.stride(0) * matrix.element_size(),
        columns,
        format.amax_bias(rule),
        rule.covers_amax,
        lite,
        n_threads or torch.get_num_threads(),
        isa.encode(),
        values.data_ptr(),
    )
    if failed:
        raise ValueError(f"no kernel for instruction set {isa!r} here; known: {', '.join(isas())}")
    return values


if getattr(_LOADER, "archive", None) is not None:
    library()  # now: the archive may be gone when the first tensor comes
