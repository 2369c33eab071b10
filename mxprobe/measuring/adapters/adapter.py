"""The base of the adapters: from a call of a module to the operands of one GEMM, for a pinned upstream version.

An adapter knows the upstream class by its package and name and never imports it. It fits where the class still takes
the arguments and has the attributes of the version named in its `Signature`; where not, `misfit` says so, and nothing
of that module is measured: an operand read from the wrong place is worse than none.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.measuring.adapters.placement import WHOLE, Placement
from mxprobe.measuring.compat import own_parts
from mxprobe.measuring.isolation import is_plain

MISFIT = "adapter does not fit"
"""The reason begins with this where a class has changed."""

Rows = Callable[[torch.Tensor], torch.Tensor]


class Reading(NamedTuple):
    """One call of one GEMM. R_x rows of X are at hand, R_g rows of G; they differ under sequence parallelism."""

    x: torch.Tensor
    """[..., K]: what the module was given on this rank, R_x rows."""
    output: torch.Tensor | None
    """The tensor whose gradient holds G, R_g rows; None where no output of this GEMM is visible."""
    y: torch.Tensor | None
    """[..., O]: this rank's own product of the rows of x, bias included; None where it is withheld."""
    withheld: str = ""
    """Why y is withheld, in words."""
    placement: Placement = WHOLE
    operand: Rows | None = None
    """Rows of x -> rows of X [R, K], where the module computes its operand itself (a norm before the GEMM)."""
    columns: tuple[int, int] | None = None
    """(first, n) of the features of `output` and of its gradient that are this rank's."""
    weight: torch.Tensor | None = None
    """[O, K], where the call was handed it."""
    on_gradient: Callable[[Callable[[torch.Tensor], None]], None] | None = None
    """Calls the function it is given with G [..., O], where no `output` is at hand whose gradient can be watched."""


Unread = str
"""Why a call cannot be read, in words."""


@dataclass(frozen=True)
class Signature:
    """An upstream class as it was when the adapter was written."""

    package: str
    """Top-level package."""
    class_name: str
    version: str
    """Distribution whose source was read."""
    forward: tuple[str, ...]
    """The first parameters of `forward`, after self."""
    attributes: tuple[str, ...] = ()
    """Attributes of an instance that the adapter reads."""

    def class_of(self, module: nn.Module) -> type | None:
        """Return the class meant here among those the module is an instance of."""
        for each in type(module).__mro__:
            if each.__name__ == self.class_name and each.__module__.partition(".")[0] == self.package:
                return each
        return None

    def misfit(self, module: nn.Module) -> str:
        """Say in what the class at hand differs from this one; "" where it does not."""
        found = self.class_of(module)
        forward = None if found is None else found.__dict__.get("forward")
        taken = _parameters(forward) if callable(forward) else self.forward
        if taken[: len(self.forward)] != self.forward:
            return self._words(f"forward({', '.join(taken)}) in place of forward({', '.join(self.forward)})")
        missing = [name for name in self.attributes if not has(module, name)]
        return self._words(f"no attribute {', '.join(missing)}") if missing else ""

    def _words(self, difference: str) -> str:
        version = getattr(sys.modules.get(self.package), "__version__", "of unknown version")
        return f"{MISFIT} {self.package} {version}: {self.class_name} has {difference} ({self.version})"


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):
        return ()


_KINDS = ("_parameters", "_buffers", "_modules")


def has(module: nn.Module, name: str) -> bool:
    """Say whether the module holds something of that name, without running a property of its class."""
    return name in vars(module) or any(name in own_parts(module, kind) for kind in _KINDS)


def held(module: nn.Module, name: str, default: Any = None) -> Any:
    """Return what the module itself holds under a name; no property of a foreign class is run."""
    for kind in _KINDS:
        inside = own_parts(module, kind)
        if name in inside:
            return inside[name]
    return vars(module).get(name, default)


class Adapter:
    """Base of the families. Stateless: one instance serves every module.

    A family says where the operands stand (`argument`, `output_of`) and what the call shows of them (`reading`).
    """

    family = ""
    signatures: tuple[Signature, ...] = ()
    prepend = False
    """The forward hook must come before those that the module already has."""
    argument = "input"
    """Name of the parameter that x is given by."""

    def recognises(self, module: nn.Module) -> bool:
        return self.signature(module) is not None

    def signature(self, module: nn.Module) -> Signature | None:
        return next((each for each in self.signatures if each.class_of(module) is not None), None)

    def misfit(self, module: nn.Module) -> str:
        """Say in what the module at hand differs from what the adapter was written for; "" where it does not."""
        signature = self.signature(module)
        return "" if signature is None else signature.misfit(module)

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        """Return names of the GEMMs that are measured, to be added to the module's; ("",) for one."""
        return ("",)

    def hidden(self, module: nn.Module) -> Mapping[str, tuple[tuple[int, int], str]]:
        """Return the names of further GEMMs, each with its (O, K) and why it is not measured."""
        return {}

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        """Return (O, K) of this rank's GEMM."""
        return held(module, "out_features"), held(module, "in_features")

    def weight(self, module: nn.Module, part: str) -> Any:
        """Return W [O, K] as this rank multiplies by it; anything but a plain tensor where it cannot be had."""
        return held(module, "weight")

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        """Return [O] that y contains, or None."""
        return None

    def read(
        self, module: nn.Module, part: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Reading | Unread:
        """Find the operands of one call, or say why they cannot be read."""
        x, y = first_argument(args, kwargs, self.argument), self.output_of(module, output)
        return self.reading(module, x, y, args, kwargs) if is_plain(x) and is_plain(y) else unreadable(x, y)

    def output_of(self, module: nn.Module, output: Any) -> Any:
        """Return the tensor of y in what the module returned."""
        return output

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        """Say what a call with a plain x and y shows."""
        return Reading(x, y, y)

    def gradient(self, gradient: Any, reading: Reading) -> torch.Tensor | None:
        """Return G [..., O] out of the gradient of `reading.output`; None where it cannot be read."""
        if not is_plain(gradient):
            return None
        return gradient if reading.columns is None else gradient.narrow(-1, *reading.columns)


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the call's first argument, given by position or by its name."""
    return args[0] if args else kwargs.get(name)


def first_of(output: Any) -> Any:
    """Return the output itself where a module returns more with it (its bias, the output of its norm)."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


def unreadable(x: Any, output: Any) -> Unread:
    """Return the reason given for a call whose tensors are not plain."""
    return f"input is a {type(x).__name__}, output a {type(output).__name__}"
