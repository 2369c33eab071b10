import math

import pytest
import torch

import mxprobe_kernels
from mxprobe.measuring.operands.operand import IDENTITY_TOLERANCE, Operand, identity_error, measure_operand
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.schema import COUNTS, ENERGY_SUMS, Role
from mxprobe.tables import OUTPUT_SUMS
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS


def operand(m: int = 64, c: int = 96, n: int = 40, *, seed: int = 0, scale: float = 1.0) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(1, m, c, generator=generator) * scale
    return Operand(Role.X_FWD, a, torch.randn(1, c, n, generator=generator), 1.0, m)


def energy(x: torch.Tensor) -> float:
    return float((x.double() ** 2).sum())


@pytest.mark.parametrize("rule", list(Rule))
def test_output_sums_are_those_of_the_product(rule: Rule):
    op = operand()
    op.a[..., 5::32] *= 30
    row = measure_operand(op, format="mxfp4", rule=rule.value).row
    fields = mxprobe_kernels.error_fields(op.a, rule=rule)
    b = op.b.double()
    e = fields.q - op.a.double()
    assert row["out_ref2"] == pytest.approx(energy(op.a.double() @ b), rel=1e-12)
    assert row["out_e2"] == pytest.approx(energy(e @ b), rel=1e-9)
    assert row["out_zeroed2"] == pytest.approx(energy((e * (fields.q == 0)) @ b), rel=1e-9)
    saturated = (e * (op.a.double().abs() > 6 * (2.0 ** _exponents(op.a, rule)))) @ b
    assert row["out_saturated2"] == pytest.approx(energy(saturated), rel=1e-9)
    scale, grid = fields.e_scale @ b, fields.e_grid @ b
    assert row["out_scale_grid"] == pytest.approx(float((scale * grid).sum()), rel=1e-9)


def _exponents(a: torch.Tensor, rule: Rule) -> torch.Tensor:
    _, exponents = mxprobe_kernels.quantize_dequantize(a, rule=rule)
    return exponents.double().repeat_interleave(32, dim=-1)[..., : a.shape[-1]]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_identity_holds(rule: Rule, scale: float):
    row = measure_operand(operand(scale=scale), format="mxfp4", rule=rule.value).row
    assert identity_error(row) < 1e-6 < IDENTITY_TOLERANCE


def test_a_violated_identity_is_seen():
    row = measure_operand(operand(), format="mxfp4", rule="rceil").row
    assert identity_error({**row, "sum_grid2": row["sum_grid2"] * 1.001}) > IDENTITY_TOLERANCE
    assert identity_error({**row, "out_dz_grid": row["out_dz_grid"] + 1e-3 * row["out_e2"]}) > IDENTITY_TOLERANCE


def test_a_row_has_every_sum_and_count():
    row = measure_operand(operand(), format="mxfp4", rule="rceil").row
    assert {*ENERGY_SUMS, *COUNTS, *OUTPUT_SUMS, "amax", "delta_hist", "code_hist"} <= set(row)


def test_non_finite_values_poison_nothing():
    op = operand()
    clean = measure_operand(op._replace(a=op.a[..., 32:], b=op.b[:, 32:]), format="mxfp4", rule="rceil").row
    op.a[..., 3] = math.nan
    op.b[0, 40, 0] = math.inf
    row = measure_operand(op, format="mxfp4", rule="rceil").row
    assert row["n_nonfinite"] == 64
    assert row["n_blocks_excluded"] == 64
    assert row["sum_e2"] == pytest.approx(clean["sum_e2"], rel=1e-6)
    assert math.isfinite(row["out_e2"])


def test_corrections_score_the_corrected_tensor():
    op = operand()
    op.a[..., 5::32] *= 30
    measured = measure_operand(op, format="mxfp4", rule="rceil")
    (rows,) = measure_corrections([measured], DEFAULT_WHATIFS)
    assert [row["correction"] for row in rows] == list(DEFAULT_WHATIFS)
    plain = mxprobe_kernels.error_fields(op.a)
    for row in rows:
        q = mxprobe_kernels.apply_correction(op.a, row["correction"]).double()
        e = q - op.a.double()
        assert row["sum_e2"] == pytest.approx(energy(e), rel=1e-9)
        assert row["sum_e2_on_d"] == pytest.approx(energy(e * plain.on_d), rel=1e-9)
        assert row["out_e2"] == pytest.approx(energy(e @ op.b.double()), rel=1e-9)
        assert row["out_zeroed2"] == pytest.approx(energy((e * plain.zeroed) @ op.b.double()), rel=1e-9)
        assert row["n_zeroed"] == int(((q == 0) & (op.a != 0)).sum())
        assert row["out_ref2"] == measured.row["out_ref2"]


def test_operands_corrected_together_score_as_they_do_alone():
    batch = [measure_operand(operand(m, seed=m), format="mxfp4", rule="floor") for m in (7, 64, 33)]
    together = list(measure_corrections(batch, DEFAULT_WHATIFS))
    alone = [next(measure_corrections([measured], DEFAULT_WHATIFS)) for measured in batch]
    for rows, expected in zip(together, alone, strict=True):
        for row, one in zip(rows, expected, strict=True):
            assert row.pop("correction") == one.pop("correction")
            assert row == pytest.approx(one, rel=1e-12)


def test_no_corrections_are_no_rows():
    assert list(measure_corrections([measure_operand(operand(), format="mxfp4", rule="rceil")], ())) == []


@pytest.mark.parametrize("rule", [Rule.RCEIL, Rule.FLOOR])
def test_rows_with_a_weight_count_so_much_in_every_sum(rule: Rule):
    op = operand(m=48)
    op.a[..., 5::32] *= 30
    halves = [op._replace(a=op.a[:, :32]), op._replace(a=op.a[:, 32:])]
    drawn, certain = (measure_operand(half, format="mxfp4", rule=rule.value) for half in halves)
    both = measure_operand(op._replace(n_certain=16, certain_weight=0.25), format="mxfp4", rule=rule.value)
    for name in (*ENERGY_SUMS, *OUTPUT_SUMS):
        assert both.row[name] == pytest.approx(drawn.row[name] + 0.25 * certain.row[name], rel=1e-6), name
    assert identity_error(both.row) < IDENTITY_TOLERANCE
    assert both.row["n"] == drawn.row["n"] + certain.row["n"] // 4
    assert abs(both.row["n_zeroed"] - drawn.row["n_zeroed"] - certain.row["n_zeroed"] / 4) <= 0.5
    assert both.row["amax"] == max(drawn.row["amax"], certain.row["amax"])
    a, b, c = (next(measure_corrections([each], ["of:0.5", "mbs:32"])) for each in (both, drawn, certain))
    for row, drawn_row, certain_row in zip(a, b, c, strict=True):
        for name in ("sum_e2", "sum_e2_on_d", "out_e2", "out_zeroed2"):
            assert row[name] == pytest.approx(drawn_row[name] + 0.25 * certain_row[name], rel=1e-6, abs=1e-12), name


def test_a_weight_hides_no_number_that_is_none():
    op = operand(m=48)
    op.a[0, 40, 3] = float("nan")
    row = measure_operand(op._replace(n_certain=16, certain_weight=0.01), format="mxfp4", rule="rceil").row
    assert (row["n_nonfinite"], row["n_blocks_excluded"]) == (1, 1)
