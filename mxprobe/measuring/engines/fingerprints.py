"""Hashes of some rows of a weight, on both sides of a weight sync: rows of table `weight_codes`.

    features f(i) = floor(i O / F), i < F = min(O, max(8, 2^14 / 4 K))       the same for W [O, K] on every side
    hash           of the row's values in bfloat16, blake2b, 8 bytes

The trainer hashes its rows as they are and rounded by each rule that an engine may round them by (`form`), for every
version that the agent keeps; of fused experts fewer rows, all experts' in one row of the table, row o of expert e as
feature e O + o. The engine hashes the rows it holds, decoded, and its columns as if they were rows
(`transposed`). Equal hashes of all rows are equal weights, whatever the layout.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterator, Sequence

import torch

from mxprobe.measuring.engines.layouts import HeldWeight
from mxprobe.measuring.recipes import quantize
from mxprobe.measuring.sampling import spread
from mxprobe.schema import AS_HELD, BF16, NOT_COMPARABLE, OF_BF16, ROUNDED, TRANSPOSED, Phase, Row

HASHED_BYTES = 1 << 14
MIN_FEATURES = 8


def features_of(out_features: int, in_features: int, device: torch.device | None = None) -> torch.Tensor:
    """Return int64 [F], made on the device (the CPU if None): to send it there would wait for the device."""
    n = min(max(HASHED_BYTES // max(4 * in_features, 1), MIN_FEATURES), out_features)
    return spread(n, out_features, device)


def row_hashes(values: torch.Tensor) -> list[int]:
    """Hash each row of [F, K] to an int64, alike exactly where the rows are in bfloat16; zeros of either sign are."""
    data = (values.detach().to(torch.bfloat16) + 0.0).cpu().contiguous()
    start, size = data.data_ptr(), data.shape[1] * data.element_size()
    rows = (ctypes.string_at(start + i * size, size) for i in range(data.shape[0]))  # torch may be there without numpy
    digests = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return [int.from_bytes(digest, "big", signed=True) for digest in digests]


def trainer_rows(
    module: str, weight: torch.Tensor, index: torch.Tensor, out_features: int, *, step: int
) -> Iterator[Row]:
    """Yield rows of one version of W. `weight` [F', K] are its rows `index`; the hashed ones among them are used."""
    wanted = features_of(out_features, weight.shape[1])
    index = index.cpu()
    at = torch.searchsorted(index, wanted).clamp(max=max(len(index) - 1, 0))
    there = index[at] == wanted
    values = weight[at[there].to(weight.device)]
    yield from version_rows(module, "", (out_features, weight.shape[1]), wanted[there].tolist(), values, step=step)


def version_rows(
    module: str, reading: str, shape: Sequence[int], features: list[int], values: torch.Tensor, *, step: int
) -> Iterator[Row]:
    """Yield rows of one version of W [O, K], or of all experts' [E, O, K]: `values` [n, K] are its rows `features`.

    `reading`: how experts are taken to be stored; see `mxprobe.measuring.engines.expert_parts`.
    """

    def row(form: str, hashes: list[int]) -> Row:
        return _row(step, module, Phase.TRAIN.value, form, reading, shape, features, hashes)

    yield row(BF16, row_hashes(values))
    for form in ROUNDED:
        hashes = row_hashes(quantize(values.float(), form))
        yield row(form, hashes)
        if values.dtype is torch.float32:
            sent = row_hashes(quantize(values.to(torch.bfloat16).float(), form))
            if sent != hashes:
                yield row(form + OF_BF16, sent)


def hashed_of(weight: HeldWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy on its device, for `engine_rows`, the rows that are hashed, and the columns where the layout has them."""
    n_out, n_in = weight.shape
    columns = None if weight.columns is None else weight.columns(features_of(n_in, n_out, weight.device))
    return weight.rows(features_of(n_out, n_in, weight.device)), columns


def engine_rows(weight: HeldWeight, values: torch.Tensor, columns: torch.Tensor | None, *, step: int) -> Iterator[Row]:
    """Yield rows of one weight that an engine holds: its rows `features_of` it and, as `transposed`, its columns."""
    n_out, n_in = weight.shape
    both = ((AS_HELD, (n_out, n_in), values), (TRANSPOSED, (n_in, n_out), columns))
    for form, shape, hashed in both:
        if hashed is not None:
            features = features_of(*shape).tolist()
            hashes = row_hashes(hashed)
            yield _row(step, weight.module, Phase.ROLLOUT.value, form, weight.layout, shape, features, hashes)


def not_comparable_row(module: str, why: str, *, step: int) -> Row:
    return _row(step, module, Phase.ROLLOUT.value, NOT_COMPARABLE, why, (0, 0), [], [])


_COLUMNS = ("module", "phase", "form", "layout", "shape", "features", "hashes")


def _row(step: int, module: str, phase: str, form: str, layout: str, shape: Sequence[int], *hashed: list[int]) -> Row:
    """Make a row of table `weight_codes`; `hashed` are the features and their hashes."""
    values = (module, phase, form, layout, list(shape), *hashed)
    return {"step": step, "time_ns": time.time_ns(), **dict(zip(_COLUMNS, values))}
