"""Hashes of codes, what an update changes of them, and sketches."""

import pytest
import torch

from mxprobe_kernels import code_hash, quantize_dequantize, row_sketch
from mxprobe_kernels.weight_codes import CHUNK_ELEMENTS


def weight(rows: int = 48, K: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))


def test_hashes_of_shards_add_up_whatever_their_order():
    w = weight()
    parts = [
        code_hash(w[20:, 64:], first_row=20, first_column=64),
        code_hash(w[:20]),
        code_hash(w[20:, :64], first_row=20),
    ]
    assert torch.equal(sum(parts, torch.zeros((), dtype=torch.int64)), code_hash(w))


def test_a_hash_is_that_of_the_codes():
    w = weight()
    q, _ = quantize_dequantize(w)
    assert torch.equal(code_hash(w), code_hash(q))
    assert torch.equal(code_hash(w), code_hash(w * 1.0000001))
    hashes = [code_hash(v) for v in (w, -w, w * 2, w.roll(1, 0), w.roll(1, 1), w[[1, 0, *range(2, 48)]])]
    hashes += [code_hash(w, rule="floor"), code_hash(w, format="nvfp4"), code_hash(w[:, :96])]
    assert len({int(h) for h in hashes}) == len(hashes)


def test_hashes_of_small_changes_are_spread_over_all_bits():
    base = torch.zeros(1, 32)
    base[0, 0] = 6.0
    bits = torch.zeros(64)
    for j in range(1, 32):
        one = base.clone()
        one[0, j] = 6.0
        differing = int(code_hash(one)) ^ int(code_hash(base))
        bits += torch.tensor([(differing >> k) & 1 for k in range(64)])
    assert bits.min() >= 5
    assert bits.max() <= 26


def test_a_shard_that_cuts_a_block_is_refused():
    with pytest.raises(ValueError, match="first_column 16 cuts a block of 32"):
        code_hash(weight(), first_column=16)


def test_sketches_keep_inner_products():
    """Mean over 4,000 sketches; the standard error of a squared norm is 2 % there."""
    x = weight(64, 8)
    s = row_sketch(x, 4000, seed=5)
    assert torch.allclose(s.T @ s / 4000, x.double().T @ x.double(), atol=8.0)
    assert torch.equal(s, row_sketch(x, 4000, seed=5))
    assert not torch.equal(s, row_sketch(x, 4000, seed=6))


def test_large_matrices_go_in_pieces():
    w = weight(3, CHUNK_ELEMENTS // 2 + 32)
    assert torch.equal(code_hash(w), code_hash(w[:1]) + code_hash(w[1:], first_row=1))
