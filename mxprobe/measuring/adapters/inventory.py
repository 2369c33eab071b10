"""Find every module that holds weights which a GEMM reads, and say which of them can be probed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from mxprobe.measuring.adapters.adapter import MISFIT, Adapter
from mxprobe.measuring.adapters.module_names import named_modules
from mxprobe.measuring.adapters.table import adapter_of
from mxprobe.measuring.interruptions import is_of_a_signal_handler


@dataclass(frozen=True)
class Entry:
    """One module that owns a matrix."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    """Of its largest parameter of two or more dimensions."""
    dtype: str
    n_parameters: int
    """Of all its parameters of two or more dimensions: what its GEMMs read."""
    selected: bool
    """A GEMM with an adapter, whose name matches a glob and that can be hooked."""
    obstacle: str = ""
    """Why its calls are not seen, or must not be watched, where that is known beforehand."""
    part: str = ""
    """Which of the module's GEMMs, as its adapter calls it."""
    has_adapter: bool = False

    @property
    def is_linear(self) -> bool:
        return self.has_adapter


def take_inventory(roots: list[nn.Module], globs: Sequence[str]) -> list[Entry]:
    """Every GEMM that an adapter knows, and every other module that directly owns a matrix, once."""
    entries: list[Entry] = []
    compiled, fused = _below(roots, is_compiled), _below(roots, has_fused_path)
    for name, module in named_modules(roots):
        if isinstance(module, ParametrizationList):
            continue  # belongs to the module it parametrizes
        obstacle = COMPILED if id(module) in compiled else _FUSED if id(module) in fused else ""
        try:
            entries += _entries_of(name, module, globs, obstacle)
        except Exception as error:  # of a class that has changed, or is no such class at all: the others go on
            if is_of_a_signal_handler(error):
                raise
            entries.append(_unread(name, module, error))
    return entries


def _entries_of(name: str, module: nn.Module, globs: Sequence[str], obstacle: str) -> list[Entry]:
    matrices, adapter = _matrices(module), adapter_of(module)
    misfit = adapter.misfit(module) if adapter is not None else ""
    if adapter is not None and not misfit:
        return list(_gemms(name, module, adapter, matrices, globs, obstacle))
    return [_unmeasured(name, module, matrices, misfit, has_adapter=adapter is not None)] if matrices else []


def _unmeasured(name: str, module: nn.Module, matrices: list[Any], obstacle: str, *, has_adapter: bool) -> Entry:
    shape = tuple(max(matrices, key=lambda p: p.numel()).shape) if matrices else (0, 0)
    n_parameters = sum(p.numel() for p in matrices)
    return Entry(name, module, shape, _dtype(matrices), n_parameters, False, obstacle, has_adapter=has_adapter)


def _unread(name: str, module: nn.Module, error: Exception) -> Entry:
    """Of a module that its adapter stumbled over."""
    matrices = [p for p in vars(module)["_parameters"].values() if p is not None and p.dim() >= 2]
    why = f"{MISFIT} {type(module).__name__}: {type(error).__name__}"
    return _unmeasured(name, module, matrices, why, has_adapter=True)


def _gemms(
    name: str,
    module: nn.Module,
    adapter: Adapter,
    matrices: list[nn.Parameter],
    globs: Sequence[str],
    obstacle: str,
) -> Iterator[Entry]:
    shapes = {part: (adapter.shape(module, part), obstacle) for part in adapter.parts(module)}
    for part, ((n_out, n_in), why) in {**shapes, **adapter.hidden(module)}.items():
        full = f"{name}.{part}" if part else name
        yield Entry(
            name=full,
            module=module,
            shape=(n_out, n_in),
            dtype=_dtype(matrices),
            n_parameters=n_out * n_in,
            selected=part in shapes and why != _FUSED and any(fnmatchcase(full, glob) for glob in globs),
            obstacle=why,
            part=part,
            has_adapter=True,
        )


def _dtype(matrices: list[nn.Parameter]) -> str:
    return str(max(matrices, key=lambda p: p.numel()).dtype).replace("torch.", "") if matrices else ""


COMPILED = "runs inside torch.compile, where module hooks do not fire"


_FUSED = "inside torch.nn.TransformerEncoderLayer, whose fused inference path a hook would switch off"


def _below(roots: list[nn.Module], is_top: Callable[[nn.Module], bool]) -> set[int]:
    """ids of the modules that are, or are inside, one for which `is_top` holds."""
    tops = [module for root in roots for module in root.modules() if is_top(module)]
    return {id(module) for top in tops for module in top.modules()}


def not_to_be_hooked(roots: list[nn.Module]) -> set[int]:
    """ids of the modules on which a forward hook never fires, or changes what is computed."""
    return _below(roots, is_compiled) | _below(roots, has_fused_path)


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None


def has_fused_path(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer)


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    own = list(module.parameters(recurse=False))
    if is_parametrized(module):
        own += list(module.parametrizations.parameters())  # pyright: ignore
    return [p for p in own if p.dim() >= 2]


def misfits(entries: list[Entry]) -> list[str]:
    """In what upstream classes differ from what the adapters were written for; each difference once."""
    return list(dict.fromkeys(e.obstacle for e in entries if e.has_adapter and e.obstacle.startswith(MISFIT)))
