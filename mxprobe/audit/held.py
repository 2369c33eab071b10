"""What is wrong with the weights that an engine holds, by pitfall."""

from __future__ import annotations

from mxprobe.attribution.held import BEHIND, FLIPPED, TURNED, UNKNOWN, HeldVersion, held_words
from mxprobe.schema import NOT_COMPARABLE

from .pitfalls import PITFALLS, Finding

_PITFALLS = {
    BEHIND: "stale_weights",
    TURNED: "reordered_weights",
    FLIPPED: "flipped_weights",
    UNKNOWN: "unknown_weights",
}


def find_held(held: tuple[HeldVersion, ...]) -> tuple[Finding, ...]:
    """Return what is wrong with it, by pitfall; what cannot be compared is no finding."""
    comparable = [each for each in held if each.state != NOT_COMPARABLE]
    found: list[Finding] = []
    for state, slug in _PITFALLS.items():
        named = [each for each in comparable if each.state == state]
        if named and state == BEHIND and len(named) < len(comparable):
            slug = "partial_refit"
        if named:
            modules = tuple(each.module for each in named)
            found.append(Finding(PITFALLS[slug], modules, f"by its codes: {held_words(named)}"))
    return tuple(found)
