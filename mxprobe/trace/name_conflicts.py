"""Keeps apart different modules that ranks call by one name, wherever rows of ranks are added.

The agent calls layers and experts by their index in the whole model
(`mxprobe.measuring.adapters.layer_numbers`). Where it could not tell, two pipeline stages may still both have a
`layers.0`: modules of one name and of different class or size.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute


def conflicting(modules: pd.DataFrame) -> frozenset[str]:
    """Return the names that ranks give to modules of different class or size, from the `modules` table.

    Shards of one weight have the same size on every rank but the last, which may have less of it.
    """
    if modules.empty or modules["rank"].nunique() < 2:
        return frozenset()
    last = modules.dropna(subset=["shape"]).drop_duplicates(["rank", "module"], keep="last")
    names: set[str] = set()
    for name, rows in last.groupby(last["module"].astype(str), observed=True, sort=False):
        shapes = [tuple(shape) for shape in rows["shape"]]
        if rows["class_name"].nunique() > 1 or not _are_shards(shapes):
            names.add(str(name))
    return frozenset(names)


def _are_shards(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether these can be parts of one weight: equal but for one dimension, in which all but one are equal."""
    most = max(shapes, key=shapes.count)
    others = [shape for shape in shapes if shape != most]
    if not others:
        return True
    differing = [i for i, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]
    return len(others) == 1 and len(others[0]) == len(most) and len(differing) == 1


def apart(data: Any, names: frozenset[str]) -> Any:
    """Put ` (rank R)` behind the names of different modules called alike; `rank` must be a column."""
    if not names or "module" not in data.column_names:
        return data
    module = data.column("module").cast(pa.string())
    rank = data.column("rank").cast(pa.string())
    named = pc.binary_join_element_wise(module, " (rank ", rank, ")", "")
    renamed = pc.if_else(pc.is_in(module, pa.array(sorted(names))), named, module).dictionary_encode()
    return data.set_column(data.column_names.index("module"), "module", renamed)
