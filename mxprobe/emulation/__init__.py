"""Quantize-dequantize emulation: what each correction does to a model, switched on in the user's own training.

The names resolve on first use: recipes parse without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Emulation as Emulation
    from .api import Skipped as Skipped
    from .api import Touched as Touched
    from .api import active as active
    from .api import emulate as emulate
    from .aqn import NoiseSchedule as NoiseSchedule
    from .aqn import QuantizationNoise as QuantizationNoise
    from .operand import Operand as Operand
    from .quantizer import quantize as quantize
    from .recipe import NAMED_RECIPES as NAMED_RECIPES
    from .recipe import Recipe as Recipe
    from .recipe import Side as Side
    from .trl import noise_callback as noise_callback

_HOME = {
    "Emulation": "api",
    "Skipped": "api",
    "Touched": "api",
    "active": "api",
    "emulate": "api",
    "NoiseSchedule": "aqn",
    "QuantizationNoise": "aqn",
    "noise_callback": "trl",
    "Operand": "operand",
    "quantize": "quantizer",
    "NAMED_RECIPES": "recipe",
    "Recipe": "recipe",
    "Side": "recipe",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
