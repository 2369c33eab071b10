"""`mxprobe.diagnose`: planted faults named and mended, natural tensors not, and what a notebook shows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import mxprobe
from mxprobe.diagnosis import NONE, UNDECIDED, Diagnosis
from tests.planted import EXPECTED

DRAWS = 12
ROWS, K = 16, 256


def draws(kind: str) -> list[Diagnosis]:
    expected = EXPECTED[kind]
    return [
        mxprobe.diagnose(expected.plant(ROWS, K, torch.Generator().manual_seed(seed)), rule=expected.rule)
        for seed in range(DRAWS)
    ]


@pytest.mark.parametrize("kind", EXPECTED)
def test_planted_faults_are_named_and_mended(kind: str):
    expected = EXPECTED[kind]
    for diagnosis in draws(kind):
        assert diagnosis.component == expected.component
        if expected.corrections:
            assert diagnosis.candidates[0] in expected.corrections
        else:
            assert (diagnosis.correction, diagnosis.candidates) == (NONE, ())


def test_a_gaussian_tensor_is_grid_noise_and_like_its_reference():
    diagnosis = mxprobe.diagnose(torch.randn(512, 256, generator=torch.Generator().manual_seed(0)))
    assert diagnosis.component == "grid"
    assert diagnosis.sqnr_db == pytest.approx(diagnosis.gaussian_sqnr_db, abs=0.1)
    assert diagnosis.zero_frac == pytest.approx(diagnosis.gaussian_zero_frac, abs=0.005)
    assert sum(diagnosis.shares[name] for name in ("scale", "deadzone", "grid")) == pytest.approx(1.0)
    gains = diagnosis.whatifs.set_index("correction")["gain"]
    assert gains["of:0.5"] == pytest.approx(0.75, abs=0.02)
    assert gains["mbs:128"] == pytest.approx(0.11, abs=0.02)
    assert gains["rule:ceil"] < -0.4
    assert gains["keep_high_precision"] == 1.0
    assert gains.is_monotonic_decreasing


def test_blocks_run_along_the_axis_asked_for():
    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)
    assert mxprobe.diagnose(x, dim=0).nmse == pytest.approx(mxprobe.diagnose(x.T.contiguous()).nmse)
    assert mxprobe.diagnose(x).zero_frac > 2 * mxprobe.diagnose(x, dim=0).zero_frac, "columns differ in size"


def test_an_open_choice_is_worded_as_one():
    found = dataclasses.replace(draws("scale_only")[0], correction=UNDECIDED, candidates=("mbs:128", "of:0.5"))
    assert "undecided between macro-block scaling (128), outlier fallback (alpha 0.5)" in str(found)


def test_nonfinite_blocks_are_counted_and_left_out():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    whole = mxprobe.diagnose(x[1:])
    x[0, 3], x[0, 40] = math.nan, math.inf
    diagnosis = mxprobe.diagnose(x)
    assert diagnosis.n_nonfinite == 2
    assert diagnosis.nmse == pytest.approx(whole.nmse)
    gains = diagnosis.whatifs.set_index("correction")["gain"]
    expected = whole.whatifs.set_index("correction")["gain"]
    assert gains["of:0.5"] == pytest.approx(expected["of:0.5"])
    assert "non-finite" in str(diagnosis)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (3, 64)])
def test_empty_and_zero_tensors_are_clean(shape: tuple[int, ...]):
    diagnosis = mxprobe.diagnose(torch.zeros(shape))
    assert (diagnosis.component, diagnosis.correction) == ("none", NONE)
    assert "No correction needed" in str(diagnosis)
    assert "<table>" in diagnosis._repr_html_()


def test_what_a_notebook_shows():
    deadzone = draws("deadzone_only")[0]
    shown = deadzone._repr_html_()
    assert "Deadzone" in shown
    assert "outlier fallback" in shown
    assert "of:0.5" in shown
    assert "Gaussian" in shown
    assert shown.count("<table") == shown.count("</table>") == 2
    assert "of:0.5" in str(deadzone)


def test_arrays_are_taken_and_the_input_is_left_alone():
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    before = x.detach().clone()
    diagnosis = mxprobe.diagnose(x)
    assert torch.equal(x.detach(), before)
    assert x.grad is None
    assert mxprobe.diagnose(before.float().numpy()).nmse == diagnosis.nmse  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "up"}, "unknown scale rule 'up'"),
        ({"corrections": ("of",)}, "takes a parameter"),
        ({"dim": 2}, "dim 2 is out of range"),
    ],
)
def test_mistakes_are_said_in_words(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        mxprobe.diagnose(torch.ones(2, 32), **options)  # type: ignore[arg-type]


def test_the_function_is_not_hidden_by_a_module_of_its_name():
    """A module called mxprobe.diagnose would take the function's place in the package once it is imported."""
    import mxprobe.diagnosis

    assert mxprobe.diagnose is mxprobe.diagnosis.diagnose
