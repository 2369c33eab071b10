"""mxprobe: attach to a live RL run, find out why MXFP4 hurts it, and which correction to switch on.

This module is also shipped into the attached process, so it imports nothing but the standard library
and stays valid Python 3.9. The public names resolve on first use.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .declaration import rollout
    from .diagnosis import diagnose
    from .emulation import emulate
    from .listener import listen
    from .trace import Trace, open_trace

__all__ = ["Trace", "__version__", "diagnose", "emulate", "listen", "open_trace", "rollout"]

_HOME = {
    "diagnose": "mxprobe.diagnosis",
    "emulate": "mxprobe.emulation",
    "Trace": "mxprobe.trace",
    "open_trace": "mxprobe.trace",
    "listen": "mxprobe.listener",
    "rollout": "mxprobe.declaration",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mxprobe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
