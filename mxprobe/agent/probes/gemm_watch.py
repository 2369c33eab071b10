"""Which GEMMs of a forward pass multiply by the matrices of a module's parameters, seen as they are called.

A `TorchFunctionMode` passes every call on as it is and looks at those that multiply. It belongs to the thread that
entered it, holds for one forward, and takes no part in what is computed. A weight operand is recognised by the storage
that it shares with a parameter (a slice, a transpose), or as a copy of one (a cast, a gather by expert, element-wise
fake quantization), followed through the call.

S = rows of tokens sent to experts, E = experts, K = in features, O = out features.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Union

import torch
from torch.overrides import TorchFunctionMode

from mxprobe.measuring.compat import take_off_function_mode, without_torch_function
from mxprobe.measuring.isolation import is_plain
from mxprobe.measuring.moe.gemm import Gemm

Which = Union[int, torch.Tensor, None]
"""Of a weight operand: the expert, the experts of its S matrices (int64 [S]), or None for all experts in order."""


class _Product(NamedTuple):
    """Arguments of a call, as y = x W^T."""

    x: torch.Tensor
    weight: torch.Tensor
    """As passed: its storage tells whose it is."""
    flipped: bool
    """It is W^T, or W^T of each expert."""
    offsets: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    swapped: bool = False
    """The call was W x^T."""


class _Root(NamedTuple):
    """A tensor that holds a parameter's values."""

    parameter: str
    tensor: Callable[[], torch.Tensor | None]
    which: Which
    start: int
    """Its storage, and where in it: bytes."""
    n_bytes: int
    is_copy: bool
    is_flipped: bool
    """Its last axis is not the one of unit stride: a transposed view, to begin with."""


class GemmWatch(TorchFunctionMode):
    """Calls `on_gemm` for each GEMM by one of `parameters` (name -> tensor of two or three dimensions)."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        on_gemm: Callable[[Gemm], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._on_gemm = on_gemm
        self._on_error = on_error
        self._thread = 0
        self._is_muted = False
        self._roots = [
            _root(name, weakref.ref(tensor), tensor, None, is_copy=False) for name, tensor in parameters.items()
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_muted and type(out) is torch.Tensor and not torch.compiler.is_compiling():
            try:
                with without_torch_function():
                    self._look(getattr(func, "__name__", ""), args, kwargs or {}, out)
            except Exception as error:
                self._on_error(error)
        return out

    @property
    def is_elsewhere(self) -> bool:
        """It is on in another thread: only that one can take it off."""
        return self._thread not in (0, threading.get_ident())

    def enter(self) -> None:
        """Watch the calls of this thread, until `leave`."""
        self._thread = threading.get_ident()
        self.__enter__()

    def leave(self) -> None:
        """Take the mode off, also where another that was entered later is still on; in the thread it is on in."""
        self._thread = 0
        take_off_function_mode(self)

    def mute(self) -> None:
        """Let go of all that it holds and look at nothing from now on; from any thread, where none can take it off."""
        self._is_muted = True
        self._roots = []
        self._on_gemm = self._on_error = _nothing

    def _look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: torch.Tensor) -> None:
        read = _READERS.get(name)
        product = None if read is None else read(*args, **kwargs)
        if product is not None:
            for each in (product, _other_way_round(product)):
                found = self._find(each.weight) if each is not None and is_plain(each.weight) else None
                if each is not None and found is not None:
                    gemm = _gemm(each, found, out)
                    if gemm is not None:
                        self._on_gemm(gemm)
                    return
        elif args and is_plain(args[0]) and args[0].dim() >= 2:
            self._follow(name, args, out)

    def _follow(self, name: str, args: Sequence[Any], out: torch.Tensor) -> None:
        """A copy of a weight is a weight."""
        source = self._find(args[0])
        if source is None or not is_plain(out) or self._find(out) is not None:
            return
        root, which = source
        index = args[1] if name == "__getitem__" and len(args) > 1 else None
        if type(index) is torch.Tensor and index.dim() == 1 and index.dtype == torch.int64:
            if which is None and args[0].dim() == 3:
                self._roots.append(_root(root.parameter, weakref.ref(out), out, index, is_copy=True))
        elif sorted(out.shape) == sorted(args[0].shape):
            self._roots.append(_root(root.parameter, weakref.ref(out), out, which, is_copy=True))

    def _find(self, tensor: torch.Tensor) -> tuple[_Root, Which] | None:
        """Whose values a tensor holds, and the expert's number."""
        start = tensor.data_ptr()
        for root in self._roots:
            if not root.start <= start < root.start + root.n_bytes:
                continue
            held = root.tensor()
            if held is None or held.data_ptr() != root.start:
                continue
            if tensor.numel() == held.numel() or root.which is not None:
                return root, root.which
            if tensor.dim() == 2 and held.dim() == 3:
                step = held.stride(0) * held.element_size()
                return root, (start - root.start) // step if step else 0
        return None


def _nothing(_: Any) -> None:
    pass


def _root(
    parameter: str,
    reference: Callable[[], torch.Tensor | None],
    tensor: torch.Tensor,
    which: Which,
    *,
    is_copy: bool,
) -> _Root:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
    n_bytes = (last + 1) * tensor.element_size()
    return _Root(parameter, reference, which, tensor.data_ptr(), n_bytes, is_copy, _is_flipped(tensor))


def _is_flipped(tensor: torch.Tensor) -> bool:
    return tensor.stride(-1) > tensor.stride(-2)


def _gemm(product: _Product, found: tuple[_Root, Which], out: torch.Tensor) -> Gemm | None:
    """None where the shapes are not those of a grouped product."""
    root, which = found
    weight = product.weight.mT if product.flipped else product.weight
    x = product.x
    swapped = product.swapped
    if swapped:
        x = x.mT

    def rows_of(y: torch.Tensor) -> torch.Tensor:
        """Kept until the backward pass: it holds no tensor of the call."""
        y = y.mT if swapped else y
        return y.reshape(-1, y.shape[-1])

    if isinstance(which, torch.Tensor) and not (x.dim() == 3 and x.shape[1] == 1 and len(which) == x.shape[0]):
        return None
    if which is None and weight.dim() == 3 and product.offsets is None and x.dim() != 3:
        return None
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[-1] != weight.shape[-1] or out.numel() != flat.shape[0] * weight.shape[-2]:
        return None
    return Gemm(
        expert=which if isinstance(which, int) else 0 if weight.dim() == 2 else None,
        experts=which if isinstance(which, torch.Tensor) else None,
        offsets=product.offsets,
        x=flat,
        is_flipped=_is_flipped(weight) != root.is_flipped,
        is_copy=root.is_copy,
        n_features=weight.shape[-2],
        bias=product.bias,
        output=out,
        rows_of=rows_of,
    )


def _other_way_round(product: _Product) -> _Product | None:
    """y^T = W x^T, with W first."""
    if not product.flipped or product.offsets is not None or product.bias is not None:
        return None
    return _Product(x=product.weight, weight=product.x, flipped=False, swapped=True)


def _linear(input: Any, weight: Any, bias: Any = None) -> _Product:
    return _Product(input, weight, False, bias=bias)


def _emulated(_plan: Any, _salt: Any, input: Any, weight: Any, bias: Any = None) -> _Product:
    return _linear(input, weight, bias)


def _matmul(input: Any, other: Any = None, **named: Any) -> _Product:
    return _Product(input, named.get("mat2", named.get("tensor2", other)), True)


def _addmm(input: Any, mat1: Any, mat2: Any, **named: Any) -> _Product | None:
    """A matrix that is added is no bias: what is returned is no product then."""
    return None if named or input.dim() != 1 else _Product(mat1, mat2, True, bias=input)


def _grouped(input: Any, weight: Any, offs: Any = None, **_named: Any) -> _Product:
    return _Product(input, weight, True, offsets=offs)


_READERS: dict[str, Callable[..., _Product | None]] = {
    "linear": _linear,
    "emulated_product": _emulated,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
}
