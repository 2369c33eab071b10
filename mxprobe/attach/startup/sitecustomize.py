"""Start-up hook of `mxprobe run`: listen, then hand over to the environment's own sitecustomize, if it has one.

The directory of this file is on PYTHONPATH of the job and its children, and taken off `sys.path` here, so that the
job finds what it would find without us. Standard library only and Python 3.9 syntax; mxprobe itself need not be
installed in the job's environment.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_HERE = os.path.dirname(os.path.abspath(__file__))
_LISTENER = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "listener.py")


def _listen() -> None:
    if os.environ.get("MXPROBE_LISTEN") != "1" or sys.hexversion < 0x03090000:
        return
    try:
        spec = spec_from_file_location("_mxprobe_listener", _LISTENER)
        if spec is not None and spec.loader is not None:
            listener = module_from_spec(spec)
            sys.modules["_mxprobe_listener"] = listener
            spec.loader.exec_module(listener)
            listener.listen()
    except Exception as error:
        sys.modules.pop("_mxprobe_listener", None)
        print(f"mxprobe: not listening: {error}", file=sys.stderr)


def _chain() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        theirs = module_from_spec(spec)
        sys.modules["sitecustomize"] = theirs
        spec.loader.exec_module(theirs)


_listen()
_chain()
