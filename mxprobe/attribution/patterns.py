r"""Lists of modules in the pattern language of a framework, that match exactly these modules and no other.

    verl (FSDP), alto  `re:` and a regular expression, matched from the start of the name    re:^model\.layers\.3\.up$
    megatron, nemo-rl  fnmatch over the whole name                                            model.layers.3.up
    others             regular expressions for the whole name, for a `filter_fn` in Python

A kind of module that is chosen in all layers becomes one pattern, `*.up_proj`, where that matches no other module.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from .knobs import SAME_AS

FNMATCH = ("megatron", "nemo-rl", *SAME_AS)
REGEX_PREFIXED = ("verl", "alto")
_PREFIX = "re:"


def exact_patterns(framework: str, chosen: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the patterns for `chosen`, some of `names`, in the framework's language.

    Raises ValueError if they would match another set of modules, which is a defect here.
    """
    wanted = set(chosen)
    found: list[str] = []
    for kind in sorted({name.rpartition(".")[2] for name in wanted}):
        of_kind = {name for name in wanted if name.rpartition(".")[2] == kind}
        whole = _spelled(framework, f"*.{kind}")
        everywhere = {name for name in names if matches(framework, whole, name)}
        if len(of_kind) > 1 and everywhere == of_kind:
            found.append(whole)
        else:
            found += [_spelled(framework, name) for name in sorted(of_kind, key=_natural)]
    matched = {name for name in names if any(matches(framework, pattern, name) for pattern in found)}
    if matched != wanted:
        raise ValueError(f"patterns {found} match {sorted(matched ^ wanted)} wrongly")
    return found


def matches(framework: str, pattern: str, name: str) -> bool:
    """Whether the framework takes `pattern` to mean the module `name`."""
    if framework in FNMATCH:
        return fnmatchcase(name, pattern)
    if framework in REGEX_PREFIXED:
        return re.match(pattern.removeprefix(_PREFIX), name) is not None
    return re.fullmatch(pattern, name) is not None


def _spelled(framework: str, name: str) -> str:
    """Return `name`, which may begin with `*`, as a pattern that is anchored at both ends."""
    star, rest = name.startswith("*"), name.removeprefix("*")
    if framework in FNMATCH:
        return ("*" if star else "") + re.sub(r"([*?\[])", r"[\1]", rest)
    body = (".*" if star else "") + re.escape(rest)
    return f"{_PREFIX}^{body}$" if framework in REGEX_PREFIXED else body


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `layers.9` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
