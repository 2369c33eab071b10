"""The maths on tensors: quantizers, the exact decomposition of their error, corrections.

Importing this package imports nothing else: `mxprobe_kernels.formats` must be usable without torch. The public
functions load torch when first asked for. Shipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxprobe_kernels.corrections import apply_correction as apply_correction
    from mxprobe_kernels.custom_op import accumulate as accumulate
    from mxprobe_kernels.custom_op import new_slots as new_slots
    from mxprobe_kernels.decomposition import Decomposition as Decomposition
    from mxprobe_kernels.frontend import decompose as decompose
    from mxprobe_kernels.frontend import error_fields as error_fields
    from mxprobe_kernels.frontend import lite as lite
    from mxprobe_kernels.frontend import quantize_dequantize as quantize_dequantize
    from mxprobe_kernels.torch_backend import ErrorFields as ErrorFields

_HOME = {
    "Decomposition": "decomposition",
    "ErrorFields": "torch_backend",
    "accumulate": "custom_op",
    "apply_correction": "corrections",
    "decompose": "frontend",
    "error_fields": "frontend",
    "lite": "frontend",
    "new_slots": "custom_op",
    "quantize_dequantize": "frontend",
}

SHIPPED_MODULES = (
    "__init__",
    "blocks",
    "columns",
    "corrections",
    "cpu_backend",
    "cpu_quantizer",
    "decomposition",
    "formats",
    "frontend",
    "lite_statistics",
    "quantizer",
    "rounding",
    "torch_backend",
)
"""What the torch path needs: standard library and torch only, Python 3.9 syntax."""

__all__ = ["SHIPPED_MODULES", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
