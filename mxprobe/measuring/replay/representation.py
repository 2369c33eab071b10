"""How each Linear's output differs under an arm, and whose error it is: rows of table `layers`.

    y  = x W^T + b      in high precision
    y' = Q(x') Q(W)^T + b      under the arm, x' the input that the arm itself brings here
    injected   = y' - (x' W^T + b)      by this layer's own rounding
    propagated = (x' W^T + b) - y       by the layers before it
    error      = y' - y = injected + propagated        SNR = ||y||^2 / ||error||^2

Exact on the rows that are kept of each Linear's first call, evenly spaced, padding among them: as many as
`MAX_ELEMENTS` of all outputs together allow. They are held from the run in high precision to the end of the arm's. A
Linear that sees another number of rows under the arm (an expert, after a router chose otherwise) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.measuring.replay.interception import Product
from mxprobe.measuring.replay.residual_stream import Difference, LayerDifference, difference, layer_rows
from mxprobe.measuring.sampling import spread
from mxprobe.schema import Row

MAX_ELEMENTS = 1 << 26
"""Elements of outputs in high precision that are held, float32."""
MIN_ROWS, MAX_ROWS = 16, 1024
INJECTED, PROPAGATED, ERROR = "injected", "propagated", "error"


class Representation:
    """Errors of an arm against `high`: `of_high` wraps the product of the first run, `of_arm` that of the second."""

    def __init__(self, modules: Mapping[str, nn.Linear]) -> None:
        self._high: dict[str, torch.Tensor] = {}
        """float32 [n, O], in the order of the calls."""
        self._n_called: dict[str, int] = {}
        """Rows of the call."""
        self._eps: dict[str, float] = {}
        self._found: dict[str, dict[str, Difference]] = {}
        width = sum(module.out_features for module in modules.values())
        self._n = min(max(MAX_ELEMENTS // max(width, 1), MIN_ROWS), MAX_ROWS)

    def of_high(self, product: Product) -> Product:
        def watched(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            y = product(name, module, x)
            if name not in self._high:
                self._high[name], self._eps[name] = self._kept(y), torch.finfo(y.dtype).eps
                self._n_called[name] = _n_rows(y)
            return y

        return watched

    def of_arm(self, product: Product) -> Product:
        def watched(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            y = product(name, module, x)
            if name not in self._found and self._n_called.get(name) == _n_rows(y):
                self._found[name] = self._errors(name, module, x, y)
            return y

        return watched

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows that are kept of [..., C], float32 [n, C]."""
        rows = x.detach().reshape(-1, x.shape[-1])
        return (rows if len(rows) <= self._n else rows[spread(self._n, len(rows), rows.device)]).float()

    @torch.no_grad()
    def _errors(self, name: str, module: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> dict[str, Difference]:
        reference, own = self._high[name], self._kept(y)
        with torch.autocast(x.device.type, enabled=False):
            bias: Any = module.bias
            bias = None if bias is None else bias.detach().float()
            exact = F.linear(self._kept(x), module.weight.detach().float(), bias)
        errors = {INJECTED: own - exact, PROPAGATED: exact - reference, ERROR: own - reference}
        reference = reference.double()
        return {each: difference(reference, reference + error) for each, error in errors.items()}

    def rows(self) -> list[Row]:
        """Return rows of table `layers` without when, `layer` being the Linear; waits for the device."""
        depth = {name: position for position, name in enumerate(self._n_called)}
        return layer_rows(
            LayerDifference(name, depth[name], what, each, self._eps[name])
            for name, parts in self._found.items()
            for what, each in parts.items()
        )

    def close(self) -> None:
        """Let the outputs in high precision go; what was found stays."""
        self._high.clear()


def _n_rows(x: torch.Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)
