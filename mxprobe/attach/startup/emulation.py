"""Start-up of a job under `mxprobe run --emulate`: when torch has been imported, models are emulated as they get an
optimizer.

Loaded by path by the `sitecustomize` beside it. The packages of the mxprobe that started the job are used where the
job's environment has none of its own. Standard library only and Python 3.9 syntax.
"""

import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

_PACKAGES = ("mxprobe_kernels", "mxprobe")


def arrange(line: str, directories: "list[str]") -> None:
    """Emulate under the recipe of that line once torch is there. `directories` hold `_PACKAGES`, in this order."""
    sys.meta_path.insert(0, _AfterTorch(line, directories))


class _AfterTorch(MetaPathFinder):
    """Finds nothing itself: has the import of torch followed by ours."""

    def __init__(self, line: str, directories: "list[str]") -> None:
        self._line = line
        self._directories = directories

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, lambda: _start(self._line, self._directories))
        return spec


class _Followed(Loader):
    def __init__(self, loader: Any, then: Any) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._then()
        except Exception as error:
            print(f"mxprobe: nothing is emulated: {type(error).__name__}: {error}", file=sys.stderr)


def _start(line: str, directories: "list[str]") -> None:
    for name, directory in zip(_PACKAGES, directories):
        if name not in sys.modules and find_spec(name) is None:
            _load_package(name, directory)
    import_module("mxprobe.emulation.automatic").start(line)


def _load_package(name: str, directory: str) -> None:
    """As `sys.modules[name]`; submodules are found through its `__path__`, and `sys.path` stays as it is."""
    init = os.path.join(directory, "__init__.py")
    spec = spec_from_file_location(name, init, submodule_search_locations=[directory])
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {directory}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
