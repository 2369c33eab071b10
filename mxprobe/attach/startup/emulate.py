"""Start-up of a job under `mxprobe run --emulate`: models are emulated as they get an optimizer.

Loaded by path by the `sitecustomize` beside it. The packages of the mxprobe that started the job are used where the
job's environment has none of its own. Standard library only and Python 3.9 syntax.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location

_PACKAGES = ("mxprobe_kernels", "mxprobe")


def start(line: str, directories: "list[str]") -> None:
    """Emulate under the recipe of that line, once torch is there. `directories` hold `_PACKAGES`, in this order."""
    for name, directory in zip(_PACKAGES, directories):
        if name not in sys.modules and find_spec(name) is None:
            _load_package(name, directory)
    import_module("mxprobe.emulation.automatic").start(line)


def _load_package(name: str, directory: str) -> None:
    """Load it as `sys.modules[name]`. Its `__path__` leads to its submodules, and `sys.path` stays as it is."""
    init = os.path.join(directory, "__init__.py")
    spec = spec_from_file_location(name, init, submodule_search_locations=[directory])
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {directory}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
