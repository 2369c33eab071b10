"""What the start-up hook does once anybody has imported torch.

Loaded by path by the `sitecustomize` beside it. Standard library only and Python 3.9 syntax.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Callable


def arrange(then: Callable[[], None], otherwise: str) -> None:
    """Call `then` at the end of the import of torch; where it fails, `otherwise` and why go to stderr."""
    sys.meta_path.insert(0, _AfterTorch(then, otherwise))


class _AfterTorch(MetaPathFinder):
    """Finds nothing itself. It has our call follow the import of torch."""

    def __init__(self, then: Callable[[], None], otherwise: str) -> None:
        self._then = then
        self._otherwise = otherwise

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._then, self._otherwise)
        return spec


class _Followed(Loader):
    def __init__(self, loader: Any, then: Callable[[], None], otherwise: str) -> None:
        self._loader = loader
        self._then = then
        self._otherwise = otherwise

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
            print(f"mxprobe: {self._otherwise}: {type(error).__name__}: {error}", file=sys.stderr)
