"""What was attached and taken off leaves no class of ours alive.

`typing` keeps what it was asked for in caches of 128 entries: `typing.Callable[[Role], None]`, evaluated per attach,
held the modules of that attach for some forty further ones. `collections.abc.Callable` keeps nothing.
"""

import subprocess
import sys

FORGET = """
import gc, importlib, pkgutil, sys, weakref
import torch
import mxprobe.agent, mxprobe.measuring

for package in (mxprobe.agent, mxprobe.measuring):
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(name)
del package
ours = [name for name in sys.modules if name.partition(".")[0] in ("mxprobe", "mxprobe_kernels")]
classes = {
    f"{name}.{key}": weakref.ref(value)
    for name in ours
    for key, value in vars(sys.modules[name]).items()
    if isinstance(value, type) and value.__module__ == name
}
assert len(classes) > 100, len(classes)
del mxprobe, name
for each in ours:
    del sys.modules[each]
del each
gc.collect()
print(*sorted(name for name, cls in classes.items() if cls() is not None))
"""


def test_no_class_outlives_its_module() -> None:
    done = subprocess.run([sys.executable, "-c", FORGET], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
