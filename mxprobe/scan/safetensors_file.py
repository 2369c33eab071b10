"""A safetensors file, read row by row: 8 bytes of header length, a JSON header, then the tensors' bytes.

Read here and not with the `safetensors` library because that refuses a truncated file as a whole; a scan wants
to name the tensors that are cut and measure the others. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mxprobe.errors import UsageError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

BITS: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
FLOATING: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Tensors of these can be decomposed as they are."""

_MADV_POPULATE_READ = 22
_ALIGNMENT = 8
"""Bytes: that of the widest dtype."""

_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"\x80", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"<", "a web page or XML"),
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class SafetensorsFile:
    """The tensors of one file that can be read (`entries`), and a sentence for each that cannot (`problems`).

    Raises:
        UsageError: no such file, empty, not safetensors, or a header that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size_bytes = path.stat().st_size
            with path.open("rb") as file:
                header, data_begin = _read_header(path, file, self.size_bytes)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
        self.metadata: dict[str, Any] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, StoredTensor] = {}
        self.problems: list[str] = []
        for name, description in header.items():
            problem = self._add(name, description, data_begin)
            if problem:
                self.problems.append(f"{path.name}: tensor {name}: {problem}")

    def read_rows(self, entry: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of the tensor seen as [rows, shape[-1]], in the file's dtype, not to be written to.

        Raises:
            UsageError: the bytes cannot be read, naming file and tensor.
        """
        columns = entry.shape[-1]
        row_bytes = columns * BITS[entry.dtype] // 8
        begin, n_bytes = entry.begin + start * row_bytes, (stop - start) * row_bytes
        try:
            with self.path.open("rb") as file:
                n_there = os.fstat(file.fileno()).st_size - begin
                data = _mapped(file, begin, n_bytes) if n_there >= n_bytes else None
                if data is None:
                    file.seek(begin)
                    data = bytearray(file.read(n_bytes))
        except OSError as error:
            raise UsageError(f"{self.path}: tensor {entry.name}: cannot read it: {error.strerror or error}") from None
        if len(data) != n_bytes:
            raise UsageError(
                f"{self.path}: tensor {entry.name}: {len(data)} of {n_bytes} bytes could be read",
                cause="the file became shorter during the scan",
            )
        return torch.frombuffer(data, dtype=FLOATING[entry.dtype]).reshape(stop - start, columns)

    def _add(self, name: str, description: Any, data_begin: int) -> str:
        """Take the tensor up into `entries`, or say why not."""
        try:
            dtype = str(description["dtype"])
            shape = tuple(int(length) for length in description["shape"])
            first, last = (int(offset) for offset in description["data_offsets"])
        except (KeyError, TypeError, ValueError):
            return "its header has no readable dtype, shape and data_offsets"
        if dtype not in BITS:
            return f"unknown dtype {dtype}"
        entry = StoredTensor(name, dtype, shape, data_begin + first, data_begin + last)
        if min(shape, default=0) < 0 or first < 0 or (last - first) * 8 != entry.n_elements * BITS[dtype]:
            return f"{last - first} bytes cannot hold {dtype} {list(shape)}: the header is corrupt"
        if entry.end > self.size_bytes:
            missing = entry.end - max(self.size_bytes, entry.begin)
            return f"the file is truncated, {missing:,} of its {last - first:,} bytes are missing"
        self.entries[name] = entry
        return ""


def _mapped(file: BinaryIO, begin: int, n_bytes: int) -> memoryview | None:
    """Map bytes [begin, begin + n_bytes) of the file as the page cache holds them; None where they have to be copied.

    A copy takes as long as measuring a third of what it copies. Pages are brought in here, because a disk's error is
    an exception to the call that asks for them and the end of the process that meets it on the way.
    """
    in_page = begin % mmap.ALLOCATIONGRANULARITY
    if not n_bytes or begin % _ALIGNMENT or not sys.platform.startswith("linux"):
        return None
    pages = mmap.mmap(file.fileno(), in_page + n_bytes, access=mmap.ACCESS_COPY, offset=begin - in_page)
    try:
        pages.madvise(_MADV_POPULATE_READ)
    except OSError:  # Linux before 5.14, or a disk that fails: reading says which
        return None
    return memoryview(pages)[in_page:]


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return the header's JSON object, and where the data begin."""
    if size == 0:
        raise UsageError(f"{path} is empty", cause="an interrupted download", remedy="fetch it again")
    start = file.read(32)
    for magic, what in _OTHER_FORMATS:
        if start.startswith(magic):
            raise UsageError(
                f"{path} is not a safetensors file: it looks like {what}",
                remedy="convert it with safetensors.torch.save_file, or fetch the safetensors version",
            )
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES or start[8:9] != b"{":
        raise UsageError(
            f"{path} is not a safetensors file: it does not start with a header",
            cause="another format, or a damaged download",
        )
    if 8 + length > size:
        raise UsageError(
            f"{path} is truncated within its header ({size:,} bytes of at least {8 + length:,})",
            cause="an interrupted download",
            remedy="fetch it again",
        )
    file.seek(8)
    try:
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: its header is corrupt: {error}", remedy="fetch the file again") from None
    return header, 8 + length
