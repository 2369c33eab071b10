"""Weights in a checkpoint, measured before any run exists: safetensors in, a trace out."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import open_checkpoint as open_checkpoint
    from .scanner import ScanResult as ScanResult
    from .scanner import ScanSettings as ScanSettings
    from .scanner import scan as scan

_HOME = {"ScanResult": "scanner", "ScanSettings": "scanner", "scan": "scanner", "open_checkpoint": "checkpoint"}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
