"""The experts of one parameter as single matrices: what a trainer's fused experts are called elsewhere.

    gate_up_proj [E, 2 F, H], down_proj [E, H, F]      row i of gate and of up: i, F + i, or 2 i, 2 i + 1 (gpt-oss)
    turned: [E, H, 2 F], [E, F, H]                     the rows of a matrix are the columns of what is stored

These two tell by their shapes which way they are stored: 2 F stands where the other parameter has F. Three parameters
[E, F, H], [E, F, H], [E, H, F] do not. transformers 5.24 says in `is_concatenated` how gate and up lie, and in
`is_transposed` which way; where nobody says, every way is a `reading` of its own, and that one is right which agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from mxprobe.measuring.adapters.adapter import held
from mxprobe.measuring.adapters.expert_structure import expert_parameters
from mxprobe.measuring.engines.shuffles import RowMap, Shuffle

SEPARATE: tuple[tuple[str, str, str], ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the three where gate and up are parameters of their own; the second in torchtitan."""
GATE, UP, DOWN = SEPARATE[0]
CERTAIN = ""


class Part(NamedTuple):
    """One of an expert's matrices W [O, K], in a parameter of all experts."""

    name: str
    """gate_proj, up_proj or down_proj, as an engine's layout and a module per expert name it."""
    parameter: str
    is_turned: bool
    rows: RowMap
    """Where the rows of W are in the parameter's matrix."""
    size: int
    """O"""
    reading: str = CERTAIN
    """How it is taken to be stored, in words; "" where that is known."""


def parts_of(module: nn.Module) -> list[Part]:
    """Return the parts in every reading that the shapes allow; none where the parameters are not known."""
    shapes = {name: (int(p.shape[1]), int(p.shape[2])) for name, p in expert_parameters(module).items()}
    if "gate_up_proj" in shapes and DOWN in shapes:
        return list(_fused(module, shapes["gate_up_proj"], shapes[DOWN]))
    for names in SEPARATE:
        if all(name in shapes for name in names):
            gate, up, down = (shapes[name] for name in names)
            return list(_separate(module, names, gate)) if gate == up == down[::-1] else []
    return []


def _fused(module: nn.Module, both: tuple[int, int], down: tuple[int, int]) -> Iterator[Part]:
    is_turned = both == (down[1], 2 * down[0])
    if not is_turned and both != (2 * down[1], down[0]):
        return
    n_ffn, n_hidden = down if is_turned else down[::-1]
    yield Part(DOWN, DOWN, is_turned, RowMap(), n_hidden)
    told = held(module, "is_concatenated")
    for is_concatenated, words in ((True, "gate over up"), (False, "gate and up row by row")):
        if not isinstance(told, bool) or told is is_concatenated:
            reading = CERTAIN if isinstance(told, bool) else words
            shuffle = Shuffle(in_pairs=not is_concatenated)
            for i, name in enumerate((GATE, UP)):
                yield Part(name, "gate_up_proj", is_turned, shuffle.rows_of(i, 2, n_ffn), n_ffn, reading)


def _separate(module: nn.Module, names: Sequence[str], gate: tuple[int, int]) -> Iterator[Part]:
    told = held(module, "is_transposed")
    for is_turned, words in ((False, "as [out, in]"), (True, "as [in, out]")):
        if not isinstance(told, bool) or told is is_turned:
            reading = CERTAIN if isinstance(told, bool) else words
            n_ffn, n_hidden = gate[::-1] if is_turned else gate
            for name, parameter, size in zip((GATE, UP, DOWN), names, (n_ffn, n_ffn, n_hidden)):
                yield Part(name, parameter, is_turned, RowMap(), size, reading)
