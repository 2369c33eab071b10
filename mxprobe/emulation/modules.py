"""Putting the emulated forward on a module, and taking it off again.

A plain Linear gets a forward of ours. A module with a forward of its own (a subclass of Linear, fused experts)
keeps it: while it runs, every F.linear that it calls is emulated, or, in attention, each of its two products.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from mxprobe.emulation.attention import InterceptAttention
from mxprobe.emulation.control import Control
from mxprobe.emulation.linear import emulated_linear
from mxprobe.emulation.quantizer import quantize
from mxprobe.emulation.recipe import HIGH_PRECISION
from mxprobe.emulation.selection import INNER_FORWARD, SITE, inner_forward, is_fused_experts, own_forward


class Site:
    """What the forward of one module needs to know. Deep copies of the module share it."""

    def __init__(self, control: Control, ordinal: int, module: nn.Module, *, is_attention: bool = False) -> None:
        self.control = control
        self.ordinal = ordinal
        self.is_attention = is_attention
        self.n_products = 0
        """Calls of attention products seen outside torch.compile."""
        self.intercepts = own_forward(module)
        self.is_experts = is_fused_experts(module)
        self.is_on = True

    def count_product(self) -> None:
        if not torch.compiler.is_compiling():
            self.n_products += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return self


def install(module: nn.Module, site: Site) -> None:
    """Replace the forward of this instance. Hooks, parameters, class and state_dict stay as they are."""
    is_underneath = SITE in module.__dict__
    if "forward" in module.__dict__ and not is_underneath:
        module.__dict__[INNER_FORWARD] = module.__dict__["forward"]
    module.__dict__[SITE] = site
    if is_underneath:  # ours was left below somebody's patch
        return
    module.__dict__["forward"] = MethodType(_forward, module)


def uninstall(module: nn.Module) -> None:
    """Undo `install`. Where somebody has patched the forward since, ours stays underneath and passes through."""
    site: Site | None = module.__dict__.get(SITE)
    if site is None:
        return
    site.is_on = False
    if getattr(module.__dict__.get("forward"), "__func__", None) is not _forward:
        return
    del module.__dict__["forward"], module.__dict__[SITE]
    if INNER_FORWARD in module.__dict__:
        module.__dict__["forward"] = module.__dict__.pop(INNER_FORWARD)


def attention_site(module: nn.Module) -> Site | None:
    """Return the site of a module whose attention products are emulated; else None."""
    site: Site | None = module.__dict__.get(SITE)
    return site if site is not None and site.is_on and site.is_attention else None


def is_installed(module: nn.Module) -> bool:
    site: Site | None = module.__dict__.get(SITE)
    return site is not None and site.is_on


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: Site = self.__dict__[SITE]
    plan = site.control.plan_now() if site.is_on else None
    if plan is None:
        return _call_inner(self, args, kwargs)
    if site.is_attention:
        with InterceptAttention(plan, site.control.salt(site.ordinal), site.count_product):
            return _call_inner(self, args, kwargs)
    if site.intercepts:
        with _InterceptLinear(site):
            return _call_inner(self, args, kwargs, unwrap=site.is_experts)
    return _linear_forward(self, site, *args, **kwargs)


def _linear_forward(module: Any, site: Site, input: torch.Tensor) -> torch.Tensor:
    control, plan = site.control, site.control.plan
    assert plan is not None
    salt = control.salt(site.ordinal)

    def quantized_weight() -> torch.Tensor:
        weight = module.weight
        if torch.is_autocast_enabled(input.device.type):
            weight = weight.to(torch.get_autocast_dtype(input.device.type))
        return quantize(weight, plan.w_fwd, dim=-1, salt=salt + 1)

    kept = control.kept_weight(site.ordinal, quantized_weight)
    if kept is not None:
        return emulated_linear(input, kept, module.bias, plan._replace(w_fwd=HIGH_PRECISION), salt)
    return emulated_linear(input, module.weight, module.bias, plan, salt)


def _call_inner(module: nn.Module, args: Any, kwargs: Any, *, unwrap: bool = False) -> Any:
    """Call what was called before.

    `unwrap` calls the plain Python loop over experts, below the choice of a grouped-GEMM implementation, which
    multiplies without F.linear.
    """
    forward = inner_forward(module)
    if INNER_FORWARD in module.__dict__:
        return forward(*args, **kwargs)
    while unwrap and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward(module, *args, **kwargs)


class _InterceptLinear(TorchFunctionMode):
    """Emulates every F.linear called inside, under the site's plan."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        control = self._site.control
        if func is F.linear and control.plan is not None:
            return emulated_product(control.plan, control.salt(self._site.ordinal), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def emulated_product(
    plan: Any, salt: int, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Call `emulated_linear` where a function mode below ours, such as a probe's, sees it as it would see F.linear."""
    if has_torch_function((input, weight)):
        return handle_torch_function(emulated_product, (input, weight), plan, salt, input, weight, bias)
    return emulated_linear(input, weight, bias, plan, salt)
