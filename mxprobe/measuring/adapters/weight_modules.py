"""Find every module that holds weights which a GEMM reads, and say which of them can be probed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from mxprobe.measuring.adapters.adapter import MISFIT
from mxprobe.measuring.adapters.families import adapter_of
from mxprobe.measuring.adapters.module_names import named_modules
from mxprobe.measuring.compat import is_compiled, own_parts
from mxprobe.measuring.interruptions import is_of_a_signal_handler


@dataclass(frozen=True)
class Entry:
    """One module that owns a matrix, or one of its GEMMs."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    """Shape of its largest parameter of two or more dimensions."""
    dtype: str
    n_parameters: int
    """Elements of all its parameters of two or more dimensions: what its GEMMs read."""
    has_adapter: bool = True
    obstacle: str = ""
    """Why its calls are not seen, or must not be watched, where that is known beforehand."""
    selected: bool = False
    """A GEMM with an adapter, whose name matches a glob and that can be hooked."""
    part: str = ""
    """Which of the module's GEMMs, as its adapter calls it."""


def take_inventory(roots: list[nn.Module], globs: Sequence[str]) -> list[Entry]:
    """Return every GEMM that an adapter knows, and every other module that directly owns a matrix, once."""
    entries: list[Entry] = []
    obstacles = dict.fromkeys(_below(roots, has_fused_path), _FUSED)
    obstacles.update(dict.fromkeys(_below(roots, is_compiled), COMPILED))
    for name, module in named_modules(roots):
        if isinstance(module, ParametrizationList):
            continue  # belongs to the module it parametrizes
        try:
            entries += _entries_of(name, module, globs, obstacles.get(id(module), ""))
        except Exception as error:  # of a class that has changed, or is no such class at all: the others go on
            if is_of_a_signal_handler(error):
                raise
            matrices = [p for p in own_parts(module, "_parameters").values() if p is not None and p.dim() >= 2]
            why = f"{MISFIT} {type(module).__name__}: {type(error).__name__}"
            entries.append(_unmeasured(name, module, matrices, why, has_adapter=True))
    return entries


def _entries_of(name: str, module: nn.Module, globs: Sequence[str], obstacle: str) -> Iterator[Entry]:
    matrices, adapter = _matrices(module), adapter_of(module)
    misfit = adapter.misfit(module) if adapter is not None else ""
    if adapter is None or misfit:
        if matrices:
            yield _unmeasured(name, module, matrices, misfit, has_adapter=adapter is not None)
        return
    shapes = {part: (adapter.shape(module, part), obstacle) for part in adapter.parts(module)}
    for part, (shape, why) in {**shapes, **adapter.hidden(module)}.items():
        full = f"{name}.{part}" if part else name
        selected = part in shapes and why != _FUSED and any(fnmatchcase(full, glob) for glob in globs)
        n_out, n_in = shape
        yield Entry(full, module, shape, _dtype(matrices), n_out * n_in, True, why, selected, part)


def _unmeasured(name: str, module: nn.Module, matrices: list[Any], obstacle: str, *, has_adapter: bool) -> Entry:
    shape = tuple(max(matrices, key=lambda p: p.numel()).shape) if matrices else (0, 0)
    n_parameters = sum(p.numel() for p in matrices)
    return Entry(name, module, shape, _dtype(matrices), n_parameters, has_adapter, obstacle)


def _dtype(matrices: list[nn.Parameter]) -> str:
    return str(max(matrices, key=lambda p: p.numel()).dtype).replace("torch.", "") if matrices else ""


COMPILED = "runs inside torch.compile, where module hooks do not fire"
_FUSED = "inside torch.nn.TransformerEncoderLayer, whose fused inference path a hook would switch off"


def _below(roots: list[nn.Module], is_top: Callable[[nn.Module], bool]) -> set[int]:
    """Return ids of the modules that are, or are inside, one for which `is_top` holds."""
    tops = [module for root in roots for module in root.modules() if is_top(module)]
    return {id(module) for top in tops for module in top.modules()}


def not_to_be_hooked(roots: list[nn.Module]) -> set[int]:
    """Return ids of the modules on which a forward hook never fires, or changes what is computed."""
    return _below(roots, is_compiled) | _below(roots, has_fused_path)


def has_fused_path(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer)


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    own = list(module.parameters(recurse=False))
    if is_parametrized(module):
        own += list(module.parametrizations.parameters())  # pyright: ignore
    return [p for p in own if p.dim() >= 2]


def misfits(entries: list[Entry]) -> list[str]:
    """Say in what upstream classes differ from what the adapters were written for; each difference once."""
    return list(dict.fromkeys(e.obstacle for e in entries if e.has_adapter and e.obstacle.startswith(MISFIT)))
