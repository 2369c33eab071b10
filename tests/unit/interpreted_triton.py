"""The Triton kernels in Triton's interpreter. Run by test_kernels_triton.py, in a process of its own:

    TRITON_INTERPRET=1 python -m pytest tests/unit/interpreted_triton.py

because the variable must be set before the kernels are imported, and nothing else should see it.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from mxprobe_kernels import (
    accumulate,
    correction_errors,
    decompose,
    decompose_grouped,
    new_slots,
    policy,
    torch_backend,
    triton_backend,
    triton_policy,
    warm_up,
)
from mxprobe_kernels.formats import FORMATS, MXFP4, Rule
from tests.cases import Case, disagreements, golden_cases, hard_tensors

RULES = list(Rule)
TENSORS = dict(hard_tensors())
OTHERS = [name for name in FORMATS if name != "mxfp4"]
CORRECTIONS = (
    *("rule:floor", "rule:even", "rule:ceil", "rule:oas", "rule:floor_div"),
    *("mbs:32", "mbs:64", "mbs:128", "mbs:256", "of:0.3", "of:1.0", "had:16", "had:32", "had:128", "sr"),
    *("nvfp4", "nvfp4_4over6", "mxfp4_4over6", "hif4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8"),
)


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


@pytest.mark.parametrize("i", range(len(TENSORS)))
def test_lite_agrees_with_the_whole(i: int):
    x = list(TENSORS.values())[i]
    rule = RULES[i // 2 % len(RULES)]
    measured = triton_backend.lite(x, rule)
    d = torch_backend.decompose(x, MXFP4, rule, -1)
    expected = [d.sum_x2, d.sum_e2, d.n_zeroed, d.n_saturated, d.n_nonfinite]
    assert measured.sums.tolist() == pytest.approx(expected, rel=1e-6, abs=0)
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
    monkeypatch.setattr(triton_backend, "programs_in_flight", lambda device: 1)
    x = torch.randn(96, 128, generator=torch.Generator().manual_seed(2))
    x *= torch.exp2(torch.linspace(-60, 60, 96)[torch.randperm(96, generator=torch.Generator().manual_seed(3))])[
        :, None
    ]
    x[::2] = 6 * torch.exp2(torch.arange(48.0) * 2 - 50)[:, None]  # on the grid at 2^44, beside errors at 2^-60
    for dim in (0, 1):
        measured = triton_backend.decompose(x, MXFP4, Rule.FLOOR, dim).to_dict()
        assert disagreements(measured, torch_backend.decompose(x, MXFP4, Rule.FLOOR, dim).to_dict(), rtol=1e-6) == []


def _some(names: Iterable[str], always: tuple[str, ...]) -> list[Any]:
    """One of each kind by default, the rest in the slow run."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _some(OTHERS, ("nvfp4_4over6", "hif4", "fp8_square", "mxfp8")))
def test_other_formats_are_exact(name: str):
    """One hard tensor a format in turn, rows and columns; and a ragged one."""
    i = OTHERS.index(name)
    for x in (list(TENSORS.values())[(2 * i + 1) % len(TENSORS)], TENSORS["ragged fp32"]):
        for dim in (0, 1):
            measured = triton_backend.decompose(x, FORMATS[name], Rule.RCEIL, dim).to_dict()
            expected = torch_backend.decompose(x, FORMATS[name], Rule.RCEIL, dim).to_dict()
            assert disagreements(measured, expected, rtol=1e-12) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_exact_on_hard_tensors(name: str):
    for x in list(TENSORS.values())[OTHERS.index(name) % 3 :: 3]:
        measured = triton_backend.decompose(x, FORMATS[name], Rule.EVEN, 1).to_dict()
        expected = torch_backend.decompose(x, FORMATS[name], Rule.EVEN, 1).to_dict()
        assert disagreements(measured, expected, rtol=1e-12) == []


def _same_errors(x: torch.Tensor, correction: str, rule: Rule, dim: int) -> None:
    measured, expected = (
        correction_errors(x, [correction], rule=rule, dim=dim, backend=backend)[0] for backend in ("triton", "torch")
    )
    assert measured[:2].tolist() == expected[:2].tolist()
    assert measured[2:].tolist() == pytest.approx(expected[2:].tolist(), rel=1e-12, abs=0)


@pytest.mark.parametrize(
    "correction", _some(CORRECTIONS, ("rule:even", "mbs:128", "of:0.3", "had:32", "sr", "nvfp4_4over6", "hif4"))
)
def test_whatifs_are_those_of_torch(correction: str):
    i = CORRECTIONS.index(correction)
    _same_errors(list(TENSORS.values())[i % len(TENSORS)], correction, Rule.RCEIL, i % 2)
    _same_errors(TENSORS["ragged fp32"], correction, RULES[i % len(RULES)], 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_whatifs_are_those_of_torch_on_hard_tensors(correction: str):
    for i, x in enumerate(list(TENSORS.values())[CORRECTIONS.index(correction) % 3 :: 3]):
        _same_errors(x, correction, Rule.RCEIL, i % 2)


@pytest.mark.parametrize(
    ("dim", "dtype", "rule"), [(-1, torch.float32, Rule.RCEIL), (0, torch.bfloat16, Rule.FLOOR)], ids=str
)
def test_experts_in_one_launch(dim: int, dtype: torch.dtype, rule: Rule):
    """Empty and one-token experts, padding at both ends, a NaN in one of them, scales far apart in another."""
    x = torch.randn(150, 70, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[20, 3], x[50] = torch.nan, 0
    x[100:140:2] = 6 * 2.0**50
    offsets = torch.tensor([2, 2, 3, 40, 40, 100, 149])
    grouped = decompose_grouped(x, offsets, rule=rule, dim=dim, backend="triton")
    for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        expected = torch_backend.decompose(x[first:end], MXFP4, rule, dim).to_dict()
        assert disagreements(grouped.expert(e).to_dict(), expected, rtol=1e-6) == []


def test_a_flag_on_the_device_switches_a_launch_off():
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(5))
    enabled = torch.ones(1, dtype=torch.int32)
    for format in ("mxfp4", "nvfp4"):
        slots = new_slots(2)
        accumulate(x, slots, 1, format, backend="triton", enabled=enabled)
        once = slots.clone()
        assert torch.equal(once[1], decompose(x, format=format, backend="triton").values)
        enabled.zero_()
        accumulate(torch.full_like(x, torch.nan), slots, 1, format, backend="triton", enabled=enabled)
        assert torch.equal(slots, once)
        enabled.fill_(1)
        accumulate(x, slots, 1, format, backend="triton", enabled=enabled)
        assert slots[1, 0] == 2 * once[1, 0]


def test_warm_up_compiles_every_kernel_it_names():
    assert warm_up("cpu", shapes=[(32, 64)], dtypes=[torch.bfloat16], dims=[-1], backend="triton") == 1


@pytest.mark.parametrize("width", [5, 300, 5000])
def test_policy_from_logits(width: int):
    g = torch.Generator().manual_seed(6)
    logits = (torch.randn(7, width, generator=g) * 8).bfloat16()
    logits[1, 1:] = -torch.inf  # one token is possible
    logits[2, ::2] = -torch.inf
    logits[3] = 3.0
    logits[4] = torch.linspace(-300, 300, width)
    tokens = torch.randint(0, width, (7,), generator=g)
    tokens[1], tokens[2] = 0, 1
    for temperature in (1.0, 0.6):
        measured = policy.TokenStatistics(*triton_policy.token_statistics(logits, tokens, temperature))
        expected = policy.token_statistics(logits.double(), tokens, temperature)
        assert torch.allclose(measured.log_prob, expected.log_prob, rtol=1e-5, atol=1e-5)
        assert torch.allclose(measured.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
