"""Call modules by their index in the whole model, without the wrappers of DDP, FSDP and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mxprobe.measuring.adapters.layer_numbers import Identity

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def named_modules(roots: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) below the roots, each once; names without what DDP and torch.compile put in front.

    Layers and experts are called by their index in the whole model, see `mxprobe.measuring.adapters.layer_numbers`.
    With several roots a name begins with its root's class, unless they are parts of one model that number their
    layers.
    """
    found: list[list[tuple[str, nn.Module]]] = []
    seen: set[int] = set()
    identities = [Identity(root) for root in roots]
    for root, identity in zip(roots, identities):
        new = [(name, module) for name, module in root.named_modules() if id(module) not in seen]
        seen |= {id(module) for _, module in new}
        found.append([(plain_name(identity(name)), module) for name, module in new])
    names = [
        name for below in found for name, module in below if next(module.parameters(recurse=False), None) is not None
    ]
    if len(roots) == 1 or (all(each.numbered for each in identities) and len(set(names)) == len(names)):
        prefixes = [""] * len(roots)
    else:
        prefixes = _prefixes(roots)
    for root, prefix, below in zip(roots, prefixes, found):
        for name, module in below:
            yield ".".join(part for part in (prefix, name) if part) or type(root).__name__, module


def _prefixes(roots: list[nn.Module]) -> list[str]:
    used: dict[str, int] = {}
    prefixes: list[str] = []
    for root in roots:
        name = type(root).__name__
        used[name] = used.get(name, 0) + 1
        prefixes.append(name if used[name] == 1 else f"{name}_{used[name]}")
    return prefixes


def plain_name(name: str) -> str:
    """Return a dotted name without leading wrapper components, and without `_orig_mod` anywhere."""
    stripped = True
    while stripped:
        stripped = False
        for wrapper in _WRAPPERS:
            if name.startswith(wrapper):
                name, stripped = name[len(wrapper) :], True
            elif name == wrapper[:-1]:
                name, stripped = "", True
    return name.replace("._orig_mod", "").replace("._fsdp_wrapped_module", "")
