"""Addresses of exported functions in the Python image that a process really runs.

A process may map two Python images: a static `python3.11` executable and a libpython3.11.so that some library
opened later. Calling into the wrong one corrupts the heap, so the executable wins whenever it exports the
functions, and a library file counts only if its inode is the one that is mapped.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
EM_X86_64 = 62
_ET_DYN = 3
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_PT_LOAD = 1


class ImageError(Exception):
    """No usable Python image. `reason` is the refusal's slug."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str
    offset: int
    inode: int
    path: str


@dataclass(frozen=True)
class PythonImage:
    """The mapped interpreter: absolute addresses of the wanted functions and its executable ranges."""

    path: str
    addresses: dict[str, int]
    text: tuple[tuple[int, int], ...]

    def holds(self, address: int) -> bool:
        return any(start <= address < end for start, end in self.text)


def read_maps(pid: int) -> list[Mapping]:
    """Return the address space of a process. OSError where the kernel does not show it."""
    mappings: list[Mapping] = []
    for line in Path("/proc", str(pid), "maps").read_text(errors="surrogateescape").splitlines():
        span, permissions, offset, _, inode, *path = line.split(None, 5)
        start, _, end = span.partition("-")
        mappings.append(
            Mapping(int(start, 16), int(end, 16), permissions, int(offset, 16), int(inode), path[0] if path else "")
        )
    return mappings


def find_python(
    pid: int, maps: Iterable[Mapping], functions: Iterable[str], *, machine: int | None = EM_X86_64
) -> PythonImage:
    """Return the image whose functions may be called. ImageError `not_python`, `python_image_changed`, ... if none.

    `machine` is the ELF number of the architecture that is wanted; None takes any.
    """
    wanted = tuple(functions)
    by_path = _by_path(maps)
    exe = os.readlink(f"/proc/{pid}/exe")
    libraries = [path for path in by_path if os.path.basename(path).startswith("libpython")]
    missing = ImageError("not_python", os.path.basename(exe))
    return _first_image(pid, by_path, (exe, *libraries), wanted, machine, missing)


def find_libc(pid: int, maps: Iterable[Mapping], functions: Iterable[str]) -> PythonImage:
    """Return the C library's functions, whatever the architecture. ImageError `injection_failed` without a library."""
    by_path = _by_path(maps)
    libraries = [path for path in by_path if os.path.basename(path).startswith(("libc.so", "libc-", "ld-musl"))]
    missing = ImageError("injection_failed", "no C library is mapped")
    return _first_image(pid, by_path, libraries, tuple(functions), None, missing)


def _by_path(maps: Iterable[Mapping]) -> dict[str, list[Mapping]]:
    by_path: dict[str, list[Mapping]] = {}
    for mapping in maps:
        if mapping.path.startswith("/"):
            by_path.setdefault(mapping.path, []).append(mapping)
    return by_path


def _first_image(
    pid: int,
    by_path: dict[str, list[Mapping]],
    paths: Iterable[str],
    wanted: tuple[str, ...],
    machine: int | None,
    missing: ImageError,
) -> PythonImage:
    exe = os.readlink(f"/proc/{pid}/exe")
    stale = ""
    for path in paths:
        mappings = by_path.get(path)
        if not mappings:
            continue
        real = f"/proc/{pid}/exe" if path == exe else _same_file(pid, path, mappings[0].inode)
        if real is None:
            stale = path
            continue
        symbols = exported(Path(real).read_bytes(), wanted, machine=machine)
        if symbols is None:
            continue
        first = min(mappings, key=lambda m: m.offset)
        bias = first.start - symbols.load_address(first.offset) if symbols.relocatable else 0
        text = tuple((m.start, m.end) for m in mappings if "x" in m.permissions)
        return PythonImage(path, {name: bias + value for name, value in symbols.values.items()}, text)
    raise ImageError("python_image_changed", stale) if stale else missing


@dataclass(frozen=True)
class Symbols:
    """Link-time values of symbols, and what is needed to relocate them."""

    values: dict[str, int]
    relocatable: bool
    loads: tuple[tuple[int, int], ...]
    """(file offset, virtual address) of each loadable segment."""

    def load_address(self, offset: int) -> int:
        """Return the page of the virtual address at which the segment mapped from that file offset was linked."""
        for segment_offset, address in self.loads:
            if segment_offset & -PAGE_BYTES == offset:
                return address & -PAGE_BYTES
        raise ImageError("injection_failed", f"no loadable segment at file offset {offset:#x}")


def exported(image: bytes, wanted: Iterable[str], *, machine: int | None = EM_X86_64) -> Symbols | None:
    """Return link-time values of the wanted symbols of a 64-bit ELF file, or None unless it defines all of them.

    ImageError `unsupported_architecture` if it is not for `machine` (None takes any).
    """
    names = {name.encode() for name in wanted}
    if image[:5] != b"\x7fELF\x02":
        return None
    file_type, found = struct.unpack_from("<HH", image, 16)
    if machine is not None and found != machine:
        raise ImageError("unsupported_architecture", f"an ELF machine of type {found}")
    values: dict[str, int] = {}
    for table in sorted(_symbol_tables(image), reverse=True):  # .dynsym is far smaller than .symtab
        for name, value in _defined(image, table, names):
            values.setdefault(name.decode(), value)
        if len(values) == len(names):
            return Symbols(values, file_type == _ET_DYN, tuple(_loads(image)))
    return None


def _same_file(pid: int, path: str, inode: int) -> str | None:
    # In a container the path is below the process's root; in a chroot of ours it is as we see it.
    for real in (f"/proc/{pid}/root{path}", path):
        try:
            if os.stat(real).st_ino == inode:
                return real
        except OSError:
            continue
    return None


def _loads(image: bytes) -> Iterator[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for i in range(count):
        kind, _, offset, address = struct.unpack_from("<IIQQ", image, table + i * size)
        if kind == _PT_LOAD:
            yield offset, address


_Table = tuple[int, int, int, int]  # section type, offset, size in bytes, offset of its strings


def _symbol_tables(image: bytes) -> Iterator[_Table]:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    for i in range(count):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", image, table + i * size)
        if kind in (_SHT_SYMTAB, _SHT_DYNSYM):
            (strings,) = struct.unpack_from("<Q", image, table + link * size + 24)
            yield kind, offset, length, strings


def _defined(image: bytes, table: _Table, names: set[bytes]) -> Iterator[tuple[bytes, int]]:
    _, offset, length, strings = table
    longest = max(map(len, names)) + 1
    for name, _, _, _, value, _ in struct.iter_unpack("<IBBHQQ", image[offset : offset + length]):
        if value:
            start = strings + name
            text = image[start : start + longest].partition(b"\0")[0]
            if text in names:
                yield text, value
