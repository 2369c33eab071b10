"""Operators that torch.compile keeps in its graphs, planted in `nn.Linear.forward` by `mxprobe run --plant-probes`.

    forward     y = x W^T + b;  ticket = observe(x, W, y)        x [..., K], W [O, K], y and G [..., O]
    backward    observe_gradient(G, ticket), then dX = G W, dW = G^T x as without

A graph that records gradients has `mxprobe::observed_2(y, x, W, anchor)` behind each nn.Linear. Autograd takes it apart
into the two operators above and a copy of y, which inductor leaves out. None of them changes a tensor. While
`observer` is None they return at once; when an agent comes or goes nothing is compiled anew.

ticket  int32 [1], not initialised: its address says which call a gradient belongs to, without reading the device.
        Nothing of the forward pass needs it, so the compiler runs `observe` where x and y are at hand anyway: in the
        forward pass or, where y is kept for another reason, in the backward pass beside `observe_gradient`. y is not
        kept for it. In a checkpointed region `observe` is not given y, and runs in the backward pass, once.
anchor  a leaf of one element. `observe_gradient` yields its gradient, 0: an operator whose result nobody needs would
        be left out by the compiler.

torch keeps compiled graphs on disk under the names of their operators: what `observed_2` becomes may not change without
a new name, or a graph that an older version has left there would call what is not there any more.

What is no plain tensor and no plain parameter there (DTensor), calls without gradient, transforms of torch.func and
torch.export are left alone. Torch alone and Python 3.9 syntax; loaded by path by the `sitecustomize` beside it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  # pyright: ignore[reportUnusedImport]  # torch.jit.script: see `plant`
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.utils import _python_dispatch

observer: Any = None
"""`on_operands(x, W, y or None, ticket)`, `on_gradient(G, ticket)`, in whatever thread runs the graph; never raise."""

_anchor = torch.zeros(1, requires_grad=True)
_library: Any = None
_is_exporting: Any = getattr(torch.compiler, "is_exporting", None)


class _Observed(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(torch.ops.mxprobe.observe(x, w, None if _is_computed_twice() else y))
        return y.clone()  # y itself would be a view, which must not be changed in place

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ticket,) = ctx.saved_tensors
        return g, None, None, torch.ops.mxprobe.observe_gradient(g, ticket)


def plant() -> None:
    """Plant the operators; to be called before anything is compiled. RuntimeError for a torch that cannot have them."""
    if not (hasattr(torch.library, "register_fake") and hasattr(torch.compiler, "is_dynamo_compiling")):
        raise RuntimeError(f"torch {torch.__version__} is older than 2.6")
    _define()
    plain = nn.Linear.forward

    @wraps(plain)  # and with it the source that torch.jit.script reads, whose `F` it looks up in this file
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        y = plain(self, input)
        if not torch.compiler.is_dynamo_compiling():
            return y
        # A parametrized one is computed anew by whoever asks for `self.weight`.
        w = self._parameters.get("weight")  # pyright: ignore[reportPrivateUsage]
        if w is None or not _is_watched(y, input, w):
            return y
        return torch.ops.mxprobe.observed_2(y, input.detach(), w.detach(), _anchor)

    nn.Linear.forward = forward


def _is_watched(y: Any, x: Any, w: Any) -> bool:
    """Return whether operators go behind this call. It is decided while the graph is traced."""
    if type(x) is not torch.Tensor or type(w) is not nn.Parameter or not torch.is_grad_enabled():
        return False
    if _is_exporting is not None and _is_exporting():
        return False
    transform = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore
    # By its type: traced, the absence of one `is not None`.
    return bool(y.requires_grad) and type(transform) is type(None)


def _is_computed_twice() -> bool:
    """Return whether a checkpointed region is traced. There, `observe` would have y computed once more."""
    if "recompute" in fx_traceback.get_current_meta():  # torch 2.6
        return True
    modes = _python_dispatch._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def _define() -> None:
    """Define the operators once in a process; they cannot be taken back."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("mxprobe", "FRAGMENT")
    names = ("pt2_compliant_tag", "flexible_layout")  # the latter: no copy for the sake of the strides of an eager run
    tags = tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))
    _library.define("observe(Tensor x, Tensor w, Tensor? y) -> Tensor", tags=tags)
    _library.define("observe_gradient(Tensor g, Tensor ticket) -> Tensor", tags=tags)
    _library.define("observed_2(Tensor y, Tensor x, Tensor w, Tensor anchor) -> Tensor", tags=tags)
    _library.impl("observe", _observe, "CompositeExplicitAutograd")
    _library.impl("observe_gradient", _observe_gradient, "CompositeExplicitAutograd")
    _library.impl("observed_2", _Observed.apply, "Autograd")
    torch.library.register_fake("mxprobe::observe", _ticket_of, lib=_library)
    torch.library.register_fake("mxprobe::observe_gradient", _no_gradient, lib=_library)


def _observe(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    ticket = _ticket_of(x, w, y)
    listening = observer
    if listening is not None:
        listening.on_operands(x, w, y, ticket)
    return ticket


def _observe_gradient(g: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    listening = observer
    if listening is not None:
        listening.on_gradient(g, ticket)
    return _no_gradient(g, ticket)


def _ticket_of(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int32, device=x.device)


def _no_gradient(g: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1)
