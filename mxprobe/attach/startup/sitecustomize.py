"""Start-up hook of `mxprobe run`: listen, emulate and plant operators where asked to, then hand over to the
environment's own sitecustomize, if it has one.

The directory of this file is on PYTHONPATH of the job and its children, and taken off `sys.path` here, so that the
job finds what it would find without us. Standard library only and Python 3.9 syntax; mxprobe itself need not be
installed in the job's environment.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, Callable

_HERE = os.path.dirname(os.path.abspath(__file__))
_LISTENER = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "listener.py")


def _listen() -> None:
    if os.environ.get("MXPROBE_LISTEN") != "1" or sys.hexversion < 0x03090000:
        return
    try:
        _load("_mxprobe_listener", _LISTENER).listen()
    except Exception as error:
        sys.modules.pop("_mxprobe_listener", None)
        print(f"mxprobe: not listening: {error}", file=sys.stderr)


def _emulate() -> None:
    line = os.environ.get("MXPROBE_EMULATE")
    if line:
        directories = os.environ["MXPROBE_PACKAGES"].split(os.pathsep)
        _after_torch(lambda: _ours("emulate").start(line, directories), "nothing is emulated")


def _plant() -> None:
    if os.environ.get("MXPROBE_PLANT") == "1":
        _after_torch(lambda: _ours("planting").plant(), "no operator is planted")


def _after_torch(then: Callable[[], None], otherwise: str) -> None:
    if sys.hexversion < 0x03090000:
        return
    try:
        _ours("after_torch").arrange(then, otherwise)
    except Exception as error:
        print(f"mxprobe: {otherwise}: {error}", file=sys.stderr)


def _ours(name: str) -> Any:
    """Return the module of that name beside this one, loaded once."""
    full = f"_mxprobe_{name}"
    return sys.modules.get(full) or _load(full, os.path.join(_HERE, f"{name}.py"))


def _load(name: str, path: str) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None  # the path names a Python file
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _chain() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        theirs = module_from_spec(spec)
        sys.modules["sitecustomize"] = theirs
        spec.loader.exec_module(theirs)


_listen()
_emulate()
_plant()
_chain()
