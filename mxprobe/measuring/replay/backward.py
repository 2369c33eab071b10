"""A Linear whose three GEMMs round their operands as an arm says, and the weight gradients that come of it.

    Y  = Q(X) Q(W)^T + b      forward, blocks along in-features
    dX = Q(G) Q(W)            dgrad, blocks along out-features
    dW = Q(G)^T Q(X)          wgrad, blocks along tokens

Each operand is rounded along its own contraction axis, so that X and W have two roundings. Products are float32.
dW goes to a collection of ours and never to `.grad`: the graph is walked for one scalar of ours that each product
takes as a further input. X [..., K], W [O, K], G [..., O], R rows; O_s: sampled output features of dW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.measuring.sampling import spread, take
from mxprobe.schema import Role

MAX_GRADIENT_ELEMENTS = 1 << 26
"""Elements of all weight gradients together that are kept of one arm; of larger models, some output features."""
MIN_FEATURES = 8

Rounds = Callable[[Role, torch.Tensor], torch.Tensor]
"""(role, operand [rows, C]) -> float32 [rows, C], rounded in blocks along C or not."""


class GradientSums(NamedTuple):
    """One module's weight gradient under an arm, D = dW_arm - dW_high, on the output features that are kept."""

    module: str
    sampled_frac: float
    values: torch.Tensor
    """float64 [3]: ||dW_high||^2, ||D||^2, <dW_high, D>; of an arm at w = Q(w) [5], with <dW_arm, w - Q(w)> and
    ||w - Q(w)||^2."""


class WeightGradients:
    """dW [O_s, K] per module, float32, added up over the calls of a module."""

    def __init__(self, modules: Mapping[str, nn.Linear], max_elements: int = MAX_GRADIENT_ELEMENTS) -> None:
        self.of: dict[str, torch.Tensor] = {}
        self.unreached: set[str] = set()
        """Modules that were called without gradient."""
        width = sum(module.in_features for module in modules.values())
        self._n_features = max(max_elements // max(width, 1), MIN_FEATURES)
        self._anchors: dict[torch.device, torch.Tensor] = {}
        self._steps: dict[str, torch.Tensor] = {}

    @property
    def anchors(self) -> list[torch.Tensor]:
        """Return scalars of zero, one a device: a backward pass for them reaches every product and no parameter."""
        return list(self._anchors.values())

    def anchor(self, device: torch.device) -> torch.Tensor:
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def features(self, out_features: int, device: torch.device) -> torch.Tensor | None:
        """Return [O_s] evenly spaced output features; None for all."""
        if out_features <= self._n_features:
            return None
        return spread(self._n_features, out_features, device)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        before = self.of.get(name)
        self.of[name] = gradient if before is None else before + gradient

    def keep_step(self, name: str, step: torch.Tensor) -> None:
        """Keep w - Q(w) [O, K] of an arm at w = Q(w)."""
        self._steps[name] = take(step, self.features(step.shape[0], step.device))

    def against(self, high: WeightGradients, modules: Mapping[str, nn.Linear]) -> Iterator[GradientSums]:
        """Yield the sums of each module that has a gradient in both; they stay on the device."""
        for name, reference in high.of.items():
            if name in self.of:
                g, d = reference.double(), self.of[name].double() - reference.double()
                sums = [(g * g).sum(), (d * d).sum(), (g * d).sum()]
                if name in self._steps:
                    step = self._steps[name].double()
                    sums += [((g + d) * step).sum(), (step * step).sum()]
                yield GradientSums(name, reference.shape[0] / modules[name].out_features, torch.stack(sums))


class Layer(NamedTuple):
    """The values that one product needs besides its input."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    rounded_weight: torch.Tensor
    """float32 [O, K] as the forward has it."""
    rounds: Rounds
    gradients: WeightGradients | None
    """Where dW goes; None where no weight gradient is wanted."""


class RoundedLinear(torch.autograd.Function):
    """`apply(x, anchor, layer)` -> y in the dtype of x, or of autocast where that is on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, layer: Layer) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        device_type = x.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        with torch.autocast(device_type, enabled=False):
            rows = layer.rounds(Role.X_FWD, x.reshape(-1, x.shape[-1]))
            bias = None if layer.bias is None else layer.bias.float()
            y = F.linear(rows, layer.rounded_weight, bias).reshape(*x.shape[:-1], -1)
        y = y.to(dtype)
        return y if y._base is None else y.clone()  # the model may change it in place, which a view forbids

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (x,) = ctx.saved_tensors
        layer: Layer = ctx.layer
        gradient = outputs[0]
        g, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        back = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                back = layer.rounds(Role.G_DGRAD, g) @ layer.rounds(Role.W_DGRAD, layer.weight.T).T
                back = back.reshape(x.shape).to(x.dtype)
            if layer.gradients is not None:
                index = layer.gradients.features(g.shape[1], g.device)
                left = layer.rounds(Role.G_WGRAD, take(g, index, dim=1).T)
                layer.gradients.add(layer.name, left @ layer.rounds(Role.X_WGRAD, rows.T).T)
        anchor = x.new_zeros((), dtype=torch.float32) if ctx.needs_input_grad[1] else None
        return back, anchor, None
