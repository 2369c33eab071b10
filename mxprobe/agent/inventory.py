"""Which modules hold weights that a GEMM reads, which of them are probed, and why the others are not.

Rows of table `modules`. FLOPs are forward and per training step, 2 * rows * parameters; modules that no hook
sees are estimated from the median rows of those that are seen, and the reason says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, Callable

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized, type_before_parametrizations

from mxprobe.agent.adapters.adapter import MISFIT, Adapter
from mxprobe.agent.adapters.table import adapter_of
from mxprobe.agent.hooks import ModuleProbe
from mxprobe.agent.interruptions import is_of_a_signal_handler
from mxprobe.agent.roots import named_modules

PROBED, NOT_SELECTED, NOT_CALLED, NOT_LINEAR = "probed", "not_selected", "not_called", "not_linear"


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

NO_GRADIENT = (
    "no gradient came to its output in some probed steps: it was changed in place as a view of a larger tensor, or the "
    "loss does not depend on it"
)

NOT_REPLAYED = "has no sensitivity and no place in replays, which compute nn.Linear alone"


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


def module_rows(entries: list[Entry], probes: dict[str, ModuleProbe]) -> list[dict[str, Any]]:
    """Rows of table `modules`, with the calls counted so far."""
    counted = [p.train_rows or p.rollout_rows for p in probes.values()]
    seen = [n for n in counted if n]
    typical = median(seen) if seen else 1
    now = time.time_ns()
    rows: list[dict[str, Any]] = []
    for entry in entries:
        probe = probes.get(entry.name)
        status, reason = _status(entry, probe)
        n_train = probe.train_rows if probe is not None else 0
        n_rollout = probe.rollout_rows if probe is not None else 0
        flops = _flops_per_row(entry)
        if status == PROBED:
            flops *= n_train or n_rollout or (0 if seen else typical)
        elif flops:
            flops *= typical
            reason += _ESTIMATED if seen else _ONE_ROW
        rows.append(
            {
                "time_ns": now,
                "module": entry.name,
                "class_name": type_before_parametrizations(entry.module).__name__,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "n_parameters": entry.n_parameters,
                "status": status,
                "reason": reason,
                "train_rows": n_train,
                "rollout_rows": n_rollout,
                "gemm_flops": float(flops),
            }
        )
    return rows


_ESTIMATED = "; its FLOPs are estimated from the median rows of the probed modules"
_ONE_ROW = "; its FLOPs are those of one row, as no call of a probed module has been counted"


def misfits(entries: list[Entry]) -> list[str]:
    """In what upstream classes differ from what the adapters were written for; each difference once."""
    return list(dict.fromkeys(e.obstacle for e in entries if e.has_adapter and e.obstacle.startswith(MISFIT)))


def _flops_per_row(entry: Entry) -> float:
    """A lookup multiplies nothing; of stacked experts one is counted, the least a token can be routed to."""
    if isinstance(entry.module, (nn.Embedding, nn.EmbeddingBag)):
        return 0.0
    if len(entry.shape) > 2 and not entry.is_linear and not isinstance(entry.module, _CONVOLUTIONS):
        return 2.0 * entry.n_parameters / entry.shape[0]
    return 2.0 * entry.n_parameters


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _status(entry: Entry, probe: ModuleProbe | None) -> tuple[str, str]:
    if not entry.is_linear:
        return NOT_LINEAR, _why_not_linear(entry)
    if probe is None and entry.obstacle:
        return NOT_CALLED, entry.obstacle
    if probe is None:
        return NOT_SELECTED, "its name matches none of the layer patterns"
    if probe.last_probed < 0 or probe.train_rows:
        not_replayed = NOT_REPLAYED * (not isinstance(entry.module, nn.Linear))
        told = (probe.withheld, NO_GRADIENT * (probe.n_lost_gradients > 0), not_replayed)
        return PROBED, "; ".join(each for each in told if each)
    if entry.obstacle:
        return NOT_CALLED, entry.obstacle + "; its weights alone are measured" * probe.weights_alone
    if probe.why_unread:
        return NOT_CALLED, f"called, but not readable: {probe.why_unread}"
    if not probe.trains and probe.rollout_rows:
        return PROBED, ""
    if probe.rollout_rows:
        return NOT_CALLED, "called in generation, never in training: the loss reads its weight directly"
    return NOT_CALLED, "never called: its weight is read directly (fused head), or this part of the model is unused"


def _why_not_linear(entry: Entry) -> str:
    if isinstance(entry.module, (nn.Embedding, nn.EmbeddingBag)):
        return "a lookup: no GEMM"
    if len(entry.shape) > 2:
        return f"{entry.shape[0]} matrices held as one parameter of {len(entry.shape)} dimensions"
    return f"{type(entry.module).__name__} holds a matrix and is no nn.Linear"
