"""Error energies of corrections: by definition, and against the measured table on fresh draws."""

import csv

import numpy as np
import pytest
import torch

from mxprobe_kernels import WHATIF_COLUMNS, apply_correction, correction_errors, error_fields, stochastic
from mxprobe_kernels.formats import MXFP4, Rule
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS
from tests.cases import GOLDEN, hard_tensors


def test_they_are_the_error_of_the_corrected_tensor():
    x = dict(hard_tensors())["zeros and non-finite bf16"]
    fields = error_fields(x)
    kept = ~fields.scales.excluded.expand(-1, -1, 32).reshape(x.shape)
    for correction, found in zip(DEFAULT_WHATIFS, correction_errors(x, DEFAULT_WHATIFS), strict=True):
        corrected = apply_correction(x, correction).double()
        counted = kept & corrected.isfinite()
        error = torch.where(counted, corrected - x.double(), 0.0).square()
        zeroed = (counted & (corrected == 0) & (x != 0)).sum()
        expected = [counted.sum(), zeroed, error.sum(), (error * fields.on_d).sum()]
        assert found.tolist() == pytest.approx([float(v) for v in expected], rel=1e-12), correction


def test_chunks_and_directions_change_nothing(monkeypatch: pytest.MonkeyPatch):
    from mxprobe_kernels import whatif

    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    names = [*DEFAULT_WHATIFS, "sr", "channels:5", "keep_high_precision"]
    whole = correction_errors(x, names)
    monkeypatch.setattr(whatif, "CHUNK_ELEMENTS", 300)
    assert torch.allclose(correction_errors(x, names), whole, rtol=1e-12, atol=0)
    assert torch.allclose(correction_errors(x.t(), names, dim=0), whole, rtol=1e-12, atol=0)
    assert whole[-1].tolist() == [x.numel(), 0, 0, 0]
    assert correction_errors(x, []).shape == (0, len(WHATIF_COLUMNS))
    assert correction_errors(x[:0], ["mbs:32", "sr"]).count_nonzero() == 0


@pytest.mark.parametrize("data", ["gauss", "laplace"])
def test_stochastic_rounding_costs_what_the_table_says(data: str):
    g = np.random.default_rng(3)
    x = torch.from_numpy(g.standard_normal((512, 512)) if data == "gauss" else g.laplace(size=(512, 512))).float()
    with (GOLDEN / "corrections_table.csv").open() as file:
        table = {(row["data"], row["corr"]): float(row["rel_total"]) for row in csv.DictReader(file)}
    base, rounded = correction_errors(x, ["rule:rceil", "sr"])[:, 2].tolist()
    assert rounded / base == pytest.approx(table[data, "SR"], rel=0.02)


def test_stochastic_rounding_is_unbiased_and_repeats_itself():
    x = torch.full((64, 64), 1.3)
    x[:, ::32] = 6.0
    draws = torch.stack([stochastic.quantize(x, MXFP4, Rule.RCEIL, 1, draw=draw) for draw in range(16)])
    assert set(draws[:, :, 1].unique().tolist()) == {1.0, 1.5}
    assert float(draws[:, :, 1:32].mean()) == pytest.approx(1.3, abs=0.01)
    assert not torch.equal(draws[0], draws[1])
    state = torch.random.get_rng_state()
    assert torch.equal(stochastic.quantize(x, MXFP4, Rule.RCEIL, 1), draws[0])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_philox_is_the_published_one():
    """Known answer of Salmon et al., Random123: counter 0, key 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(w) for w in stochastic.philox((zero, zero, 0, zero), key=0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
