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

from mxprobe_kernels.blocks import pad_rows, rows_of, tiles, unit_stride
from mxprobe_kernels.decomposition import N_VALUES, Decomposition, empty
from mxprobe_kernels.formats import MXFP4, Format, Rule, ScaleType
from mxprobe_kernels.lite_statistics import Lite, from_decomposition
from mxprobe_kernels.rounding import tensor_unit
from mxprobe_kernels.torch_backend import finite_amax

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cpu", "libmxprobe_cpu.so")
SHIPPED_LIBRARY = "libmxprobe_cpu.so"
"""Name of the library in the archive that an agent is loaded from."""

_INTERFACE = 4
"""Version of the interface of dispatch.cpp. An older library beside newer Python is not used."""

_LOADER: Any = __spec__.loader if __spec__ else None

_TILE_ELEMENTS = 1 << 18
"""Elements that are held in float32 blocks at one time, by formats beside MXFP4."""

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
    """Return the loaded library; None where none was built, or where it is of another version or machine."""
    try:
        loaded = _load()
        loaded.mxprobe_isas.restype = ctypes.c_char_p
        pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        loaded.mxprobe_statistics.argtypes = [pointer, i32, i64, i64, i64, *[i32] * 5, ctypes.c_char_p, pointer]
        loaded.mxprobe_quantize.argtypes = [pointer, pointer, i64, i32, ctypes.c_char_p, pointer, pointer]
        loaded.mxprobe_format_statistics.argtypes = [pointer, pointer, pointer, ctypes.c_char_p, pointer]
        current = loaded.mxprobe_interface() == _INTERFACE and loaded.mxprobe_values() == N_VALUES
        return loaded if current else None
    except (OSError, AttributeError):
        return None


def isas() -> tuple[str, ...]:
    """Return the instruction sets that the library has kernels for and this machine runs, best first."""
    loaded = library()
    return tuple(loaded.mxprobe_isas().decode().split(",")) if loaded else ()


def supports(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and library() is not None


class FormatRecord(ctypes.Structure):
    """`mxprobe::Format` of quantize.hpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("block", "mantissa_bits", "min_exponent", "bias", "floor_bias")),
        *((name, ctypes.c_int32) for name in ("max_exponent", "scale", "four_over_six")),
        *((name, ctypes.c_double) for name in ("qmax", "unit")),
    )

    @classmethod
    def of(cls, format: Format, rule: Rule, size: int, tensor_amax: torch.Tensor | None) -> FormatRecord:
        """`size`: elements of a block; `tensor_amax`: float32 [], where the format has a scale for the tensor."""
        unit = float(tensor_unit(tensor_amax, format)) if tensor_amax is not None and format.tensor_scale else 0.0
        biases = format.amax_bias(rule), format.amax_bias(Rule.FLOOR)
        scale = tuple(ScaleType).index(format.scale)
        return cls(
            *(size, format.mantissa_bits, format.min_exponent, *biases, format.max_exponent, scale),
            *(format.four_over_six, format.qmax, unit),
        )


class _Grid(ctypes.Structure):
    """`mxprobe::Grid` of quantize.hpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "across", "height", "width", "last_height", "last_width")
    )


@torch.no_grad()
def decompose(
    x: torch.Tensor, format: Format, rule: Rule, dim: int, *, isa: str = "", n_threads: int | None = None
) -> Decomposition:
    """Decompose x as `torch_backend.decompose` does; sums within 1e-6 of float64, codes, counts, histograms exact.

    `isa`: one of `isas()`, the best by default. `n_threads`: torch's own number by default; the result is the same.
    Formats beside MXFP4 are measured in double, in the calling thread. ValueError where there is no library, or no such
    instruction set.
    """
    if format != MXFP4:
        return Decomposition(_format_statistics(x, format, rule, dim, isa), format.name, rule.value)
    return Decomposition(_statistics(x, format, rule, dim, False, isa, n_threads), format.name, rule.value)


@torch.no_grad()
def lite(x: torch.Tensor, format: Format, rule: Rule, dim: int, *, isa: str = "", n_threads: int | None = None) -> Lite:
    """Return the always-on statistics, of MXFP4 at about three times the rate of `decompose`; the rest is as there."""
    if format != MXFP4:
        return from_decomposition(decompose(x, format, rule, dim, isa=isa))
    values = _statistics(x, format, rule, dim, True, isa, n_threads)
    return from_decomposition(Decomposition(values, format.name, rule.value))


def _statistics(
    x: torch.Tensor, format: Format, rule: Rule, dim: int, lite: bool, isa: str, n_threads: int | None
) -> torch.Tensor:
    """float64 [N_VALUES]; under `lite` those that `Lite` is made of, zeros elsewhere."""
    loaded = _library_for(x)
    rows = rows_of(x, dim)
    values = empty(x.device)
    if not rows.numel():
        return values
    if rows.dtype == torch.float64:
        rows = rows.float()
    matrix, columns = unit_stride(rows)
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
        raise _no_kernel(isa)
    return values


def _format_statistics(x: torch.Tensor, format: Format, rule: Rule, dim: int, isa: str) -> torch.Tensor:
    loaded = _library_for(x)
    rows = rows_of(x, dim)
    values = empty(x.device)
    high = format.block_rows
    record = FormatRecord.of(format, rule, format.block * high, finite_amax(rows) if format.tensor_scale else None)
    for tile in tiles(rows, format.block, _TILE_ELEMENTS, high) if rows.numel() else ():
        blocks = pad_rows(tile, format.block, high).contiguous()
        n_rows, width = tile.shape
        last = n_rows - (len(blocks) - 1) * high, width - (blocks.shape[1] - 1) * format.block
        grid = _Grid(len(blocks), blocks.shape[1], high, format.block, *last)
        pointers = ctypes.byref(record), blocks.data_ptr(), ctypes.byref(grid)
        if loaded.mxprobe_format_statistics(*pointers, isa.encode(), values.data_ptr()):
            raise _no_kernel(isa)
    return values


def _library_for(x: torch.Tensor) -> ctypes.CDLL:
    loaded = library()
    if loaded is None or not supports(x):
        raise ValueError("the CPU kernels were not built, or cannot take this tensor; use backend='torch'")
    return loaded


def _no_kernel(isa: str) -> ValueError:
    return ValueError(f"no kernel for instruction set {isa!r} here; known: {', '.join(isas())}")


if getattr(_LOADER, "archive", None) is not None:
    library()  # now: the archive may be gone when the first tensor comes
