"""Module names as people and URLs see them: order, short labels, and slugs that never collide."""

import re
from collections.abc import Iterable, Sequence


def slugs(names: Sequence[str]) -> list[str]:
    """Return one id-safe slug per name, in order; names that would slug alike get a number."""
    taken: set[str] = set()
    result: list[str] = []
    for name in names:
        base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80] or "module"
        slug, n = base, 2
        while slug in taken:
            slug, n = f"{base}-{n}", n + 1
        taken.add(slug)
        result.append(slug)
    return result


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def in_model_order(seen: Iterable[str], model_order: Sequence[str]) -> list[str]:
    """Return `seen` in the order of `model_order` (as the agent walked the model), unknown ones after it."""
    wanted = set(seen)
    known = [name for name in dict.fromkeys(model_order) if name in wanted]
    return known + sorted(wanted - set(known), key=natural_key)


def block_of(name: str) -> str:
    """Return the depth a module is at: its first numbered path segment, else its first segment."""
    parts = name.split(".")
    return next((part for part in parts if part.isdecimal()), parts[0])


def kinds_of(names: Sequence[str]) -> list[str]:
    """Return last path segments, for axes: `model.layers.3.self_attn.q_proj` -> `q`."""
    return [name.rsplit(".", 1)[-1].removesuffix("_proj") or name for name in names]
