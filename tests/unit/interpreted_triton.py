"""The Triton kernels in Triton's interpreter. Run by test_kernels_triton.py, in a process of its own:

    TRITON_INTERPRET=1 python -m pytest tests/unit/interpreted_triton.py

because the variable must be set before the kernels are imported, and nothing else should see it.
"""

import pytest
import torch

from mxprobe_kernels import torch_backend, triton_backend
from mxprobe_kernels.formats import MXFP4, Rule
from tests.cases import Case, disagreements, golden_cases, hard_tensors

RULES = list(Rule)


def _turns(i: int, rule: Rule, dim: int) -> bool:
    """One rule and one direction a case in turn by default, all of them in the slow run."""
    return RULES[i % len(RULES)] is rule and (i // len(RULES) + dim) % 2 == 0


GOLDEN = [
    pytest.param(case, rule, id=f"{case.name} {rule}", marks=() if RULES[i % len(RULES)] is rule else pytest.mark.slow)
    for i, case in enumerate(golden_cases())
    for rule in RULES
]
HARD = [
    pytest.param(x, rule, dim, id=f"{name} {rule} dim{dim}", marks=() if _turns(i, rule, dim) else pytest.mark.slow)
    for i, (name, x) in enumerate(hard_tensors())
    for rule in RULES
    for dim in (0, 1)
]


@pytest.mark.parametrize(("case", "rule"), GOLDEN)
def test_golden_case(case: Case, rule: Rule):
    measured = triton_backend.decompose(case.x, MXFP4, rule, -1).to_dict()
    assert disagreements(measured, case.rules[rule.value], rtol=1e-6) == []


@pytest.mark.parametrize(("x", "rule", "dim"), HARD)
def test_hard_tensor(x: torch.Tensor, rule: Rule, dim: int):
    measured = triton_backend.decompose(x, MXFP4, rule, dim).to_dict()
    expected = torch_backend.decompose(x, MXFP4, rule, dim).to_dict()
    assert disagreements(measured, expected, rtol=1e-6) == []


@pytest.mark.parametrize("i", range(0, len(hard_tensors()), 2))
def test_lite_agrees_with_the_whole(i: int):
    _, x = hard_tensors()[i]
    rule = RULES[i // 2 % len(RULES)]
    measured = triton_backend.lite(x, rule)
    d = torch_backend.decompose(x, MXFP4, rule, -1)
    expected = [d.sum_x2, d.sum_e2, d.n_zeroed, d.n_saturated, d.n_nonfinite]
    assert measured.sums.tolist() == pytest.approx(expected, rel=1e-6)
    assert float(measured.amax) == d.amax


def test_lite_refuses_what_it_would_have_to_copy():
    with pytest.raises(ValueError, match="unit-stride last axis"):
        triton_backend.lite(torch.ones(64, 64)[:, ::2], Rule.RCEIL)
    assert triton_backend.lite(torch.ones(0, 64), Rule.RCEIL).sums.tolist() == [0] * 5


def test_strides_shapes_and_nothing():
    x = torch.randn(5, 40, 12, generator=torch.Generator().manual_seed(1))
    for view in (x, x.transpose(0, 2), x[:, ::2], x[0].t(), x[:0]):
        for dim in range(view.dim()):
            measured = triton_backend.decompose(view, MXFP4, Rule.RCEIL, dim).to_dict()
            expected = torch_backend.decompose(view, MXFP4, Rule.RCEIL, dim).to_dict()
            assert disagreements(measured, expected, rtol=1e-6) == []


def test_a_program_takes_several_tiles(monkeypatch: pytest.MonkeyPatch):
    """The running exponent rises and falls between tiles without losing what came before."""
    monkeypatch.setattr(triton_backend, "_programs_in_flight", lambda device: 1)
    x = torch.randn(96, 128, generator=torch.Generator().manual_seed(2))
    x *= torch.exp2(torch.linspace(-60, 60, 96)[torch.randperm(96, generator=torch.Generator().manual_seed(3))])[
        :, None
    ]
    for dim in (0, 1):
        measured = triton_backend.decompose(x, MXFP4, Rule.FLOOR, dim).to_dict()
        assert disagreements(measured, torch_backend.decompose(x, MXFP4, Rule.FLOOR, dim).to_dict(), rtol=1e-6) == []
