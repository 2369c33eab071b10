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
    from mxprobe_kernels.custom_op import warm_up as warm_up
    from mxprobe_kernels.decomposition import Decomposition as Decomposition
    from mxprobe_kernels.frontend import decompose as decompose
    from mxprobe_kernels.frontend import lite as lite
    from mxprobe_kernels.grouped import GroupedDecomposition as GroupedDecomposition
    from mxprobe_kernels.grouped import decompose_grouped as decompose_grouped
    from mxprobe_kernels.policy import exact_kl as exact_kl
    from mxprobe_kernels.policy import token_statistics as token_statistics
    from mxprobe_kernels.quantizer import quantize_dequantize as quantize_dequantize
    from mxprobe_kernels.torch_backend import ErrorFields as ErrorFields
    from mxprobe_kernels.torch_backend import error_fields as error_fields
    from mxprobe_kernels.weight_codes import code_hash as code_hash
    from mxprobe_kernels.weight_codes import row_sketch as row_sketch
    from mxprobe_kernels.whatif import WHATIF_COLUMNS as WHATIF_COLUMNS
    from mxprobe_kernels.whatif import correction_errors as correction_errors

_HOME = {
    name: module
    for module, names in {
        "corrections": ("apply_correction",),
        "custom_op": ("accumulate", "new_slots", "warm_up"),
        "decomposition": ("Decomposition",),
        "frontend": ("decompose", "lite"),
        "grouped": ("GroupedDecomposition", "decompose_grouped"),
        "policy": ("exact_kl", "token_statistics"),
        "quantizer": ("quantize_dequantize",),
        "torch_backend": ("ErrorFields", "error_fields"),
        "weight_codes": ("code_hash", "row_sketch"),
        "whatif": ("WHATIF_COLUMNS", "correction_errors"),
    }.items()
    for name in names
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
    "grouped",
    "lite_statistics",
    "policy",
    "quantizer",
    "recipe_grammar",
    "rounding",
    "stochastic",
    "torch_backend",
    "torch_grouped",
    "weight_codes",
    "whatif",
)
"""What the torch path needs: standard library and torch only, Python 3.9 syntax."""

__all__ = ["SHIPPED_MODULES", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
