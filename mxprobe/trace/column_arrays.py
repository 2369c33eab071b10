"""Columns of a piece of a trace (a `pa.Table`) as numpy arrays, without a frame in between."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]


def codes(piece: Any, column: str, index: Mapping[str, int]) -> Indices:
    """Return (n,) the position of each name of a dictionary column in `index`; -1 where it is null or has none."""
    encoded = piece.column(column).combine_chunks()
    table = np.array([*(index.get(str(name), -1) for name in encoded.dictionary.to_pylist()), -1], dtype=np.int64)
    if not encoded.null_count:
        return table[encoded.indices.to_numpy()]
    return table[encoded.indices.fill_null(len(table) - 1).to_numpy()]


def names_of(piece: Any, column: str) -> list[str]:
    """Return the distinct names of a dictionary column that occur in a piece, in order."""
    return [str(name) for name in piece.column(column).unique().to_pylist() if name is not None]


def numbers(piece: Any, columns: Sequence[str]) -> Array:
    """Return (columns, n) float64, NaN where null."""
    values = np.empty((len(columns), piece.num_rows))
    for row, name in enumerate(columns):
        values[row] = piece.column(name).to_numpy()
    return values
