"""Quantize-dequantize emulation: what each correction does to a model, switched on in the user's own training.

The names resolve on first use: recipes parse without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxprobe_kernels.recipe_grammar import Operand as Operand

    from .api import Emulation as Emulation
    from .api import Skipped as Skipped
    from .api import Touched as Touched
    from .api import active as active
    from .api import emulate as emulate
    from .aqn import NoiseSchedule as NoiseSchedule
    from .aqn import QuantizationNoise as QuantizationNoise
    from .quantizer import quantize as quantize
    from .recipe import NAMED_RECIPES as NAMED_RECIPES
    from .recipe import Recipe as Recipe
    from .recipe import Side as Side
    from .trl import noise_callback as noise_callback

_HOME = {
    name: module
    for module, names in {
        "api": ("Emulation", "Skipped", "Touched", "active", "emulate"),
        "aqn": ("NoiseSchedule", "QuantizationNoise"),
        "quantizer": ("quantize",),
        "recipe": ("NAMED_RECIPES", "Operand", "Recipe", "Side"),
        "trl": ("noise_callback",),
    }.items()
    for name in names
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
