"""Summarises the trace of a scan: totals per direction, what-ifs, the worst weights.

A calibration adds the activations, the errors of the products, and what moves the model. Torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.attribution.gaussian import gaussian_reference
from mxprobe.attribution.sensitivity_ranks import is_valid, operand_sensitivity, validity
from mxprobe.attribution.tensor import judge_tensor
from mxprobe.schema import Role
from mxprobe.trace import Trace
from mxprobe_kernels.formats import MXFP4

SCHEMA = "mxprobe.scan/1"
ROLES = (str(Role.W_FWD), str(Role.W_DGRAD))
ACTIVATIONS = str(Role.X_FWD)
_SHOWN = (
    "nmse",
    "sqnr_db",
    "scale",
    "deadzone",
    "grid",
    "raw_scale",
    "raw_deadzone",
    "raw_grid",
    "cos_scale_grid",
    "zero_frac",
    "saturated_frac",
    "on_d",
)
_SPLIT = ("scale", "deadzone", "grid", "raw_scale", "raw_deadzone", "raw_grid", "cos_scale_grid")


def summarise(trace: Trace, *, worst: int = 5) -> dict[str, Any]:
    """Return a JSON-ready summary.

    `directions`, one per role: ratios of the sums over all weights, what each correction leaves of the error, and, for
    MXFP4, the Gaussian reference and the judgement of all weights as one tensor. `worst` weights by NMSE, `modules` by
    status, `quantized` ones by format, `problems`. `calibration`, null without one: see `_calibration`.
    """
    of_batches, tried_on_batches = trace.tensors(), trace.whatif()
    modules = trace.modules()
    tensors, whatif = (frame[frame["step"] == 0] for frame in (of_batches, tried_on_batches))
    run: Mapping[str, Any] = trace.run
    return {
        "schema": SCHEMA,
        "checkpoint": run.get("scan", {}).get("checkpoint", ""),
        "format": run.get("format"),
        "rule": run.get("rule"),
        "directions": [
            _direction(role, tensors, whatif, str(run.get("rule"))) for role in ROLES if _has(tensors, role)
        ],
        "worst": _worst(tensors, worst),
        "modules": {str(status): int(count) for status, count in modules["status"].astype(str).value_counts().items()},
        "quantized": run.get("scan", {}).get("quantized", {}),
        "nonfinite": _nonfinite(tensors),
        "problems": run.get("scan", {}).get("problems", []),
        "calibration": _calibration(trace, of_batches, tried_on_batches, worst) if run.get("calibration") else None,
    }


def _calibration(trace: Trace, tensors: pd.DataFrame, whatif: pd.DataFrame, count: int) -> dict[str, Any]:
    """`inputs` as `run.json` has them; `activations` like a direction, with `output_error`, the energy of the error
    of the GEMM's output relative to it, of X and of W; `worst_outputs` by that of X; `kl` of each replayed arm against
    the model as it is, nats per token; `most_sensitive` operands by predicted KL; `is_first_order`: the sum over
    operands predicts the replayed KL. The last three are null where the model has no next-token distribution."""
    tensors, whatif = tensors[tensors["step"] > 0], whatif[whatif["step"] > 0]
    found: dict[str, Any] = {
        "inputs": dict(trace.run["calibration"]),
        "activations": None,
        "worst_outputs": [],
        "kl": None,
        "most_sensitive": None,
        "is_first_order": None,
    }
    if _has(tensors, ACTIVATIONS):
        errors = ratios.totals(tensors, ["module", "role"])
        errors["output_error"] = errors["out_e2"] / errors["out_ref2"].where(errors["out_ref2"] > 0)
        mean = errors.groupby("role", observed=True)["output_error"].mean()
        of_inputs = errors[errors["role"].astype(str) == ACTIVATIONS].sort_values("output_error", ascending=False)
        found["activations"] = _direction(ACTIVATIONS, tensors, whatif, str(trace.run.get("rule"))) | {
            "output_error": {str(role): _number(value) for role, value in mean.items()}
        }
        worst = of_inputs.head(count).assign(zero_frac=of_inputs["n_zeroed"] / of_inputs["n"])
        found["worst_outputs"] = _records(worst, ("module",), ("output_error", "zero_frac"))
    replays, sensitivity = trace.replays(), trace.sensitivity()
    if not replays.empty and not sensitivity.empty:
        arms = replays.groupby("arm", observed=True, sort=False)[["sum_kl", "n_tokens"]].sum()
        found["kl"] = {str(arm): _number(row["sum_kl"] / row["n_tokens"]) for arm, row in arms.iterrows()}
        operands = operand_sensitivity(sensitivity).head(count)
        found["most_sensitive"] = _records(operands, ("module", "role"), ("predicted_kl",))
        found["is_first_order"] = is_valid(validity(sensitivity, replays))
    return found


def _has(tensors: pd.DataFrame, role: str) -> bool:
    return bool((tensors["role"].astype(str) == role).any())


def _direction(role: str, tensors: pd.DataFrame, whatif: pd.DataFrame, rule: str) -> dict[str, Any]:
    rows = tensors[tensors["role"].astype(str) == role]
    sums = ratios.totals(rows, ["role"])
    values = ratios.tensor_ratios(sums).iloc[0]
    tried = whatif[whatif["role"].astype(str) == role]
    after = {
        str(row["correction"]): {"sum_e2": float(row["sum_e2"]), "sum_e2_on_d": float(row["sum_e2_on_d"])}
        for _, row in ratios.totals(tried, ["correction"]).iterrows()
    }
    total = float(sums["sum_e2"].iloc[0])
    found: dict[str, Any] = {
        "role": role,
        "n": int(sums["n"].iloc[0]),
        **{name: _number(values[name]) for name in _SHOWN},
    }
    if str(rows["format"].iloc[0]) == MXFP4.name:
        reference = gaussian_reference(float(values["log2_rms"]), rule)
        judgement = judge_tensor({str(name): value for name, value in sums.iloc[0].items()}, after)
        found |= {
            "gaussian_sqnr_db": _number(reference.sqnr_db),
            "gaussian_zero_frac": _number(reference.zero_frac),
            "component": str(judgement.component),
        }
    else:
        # The remainder split names mechanisms only for power-of-two scales on the E2M1 grid.
        found |= dict.fromkeys((*_SPLIT, "gaussian_sqnr_db", "gaussian_zero_frac", "component"))
    return {
        **found,
        "corrections": {name: _number(sums_after["sum_e2"] / total) for name, sums_after in after.items() if total > 0},
    }


def _worst(tensors: pd.DataFrame, count: int) -> list[dict[str, Any]]:
    if tensors.empty:
        return []
    values = ratios.tensor_ratios(tensors)
    table = pd.concat([tensors[["module", "role", "format"]].astype(str), values[list(_SHOWN)]], axis=1)
    table = table.sort_values("nmse", ascending=False, kind="stable").head(count)
    is_split = table["format"] == MXFP4.name
    return [
        record if split else record | dict.fromkeys(_SPLIT)
        for record, split in zip(_records(table, ("module", "role"), _SHOWN), is_split, strict=True)
    ]


def _nonfinite(tensors: pd.DataFrame) -> list[str]:
    bad = tensors[tensors["n_nonfinite"].fillna(0) > 0]
    return sorted(set(bad["module"].astype(str)))


def _records(rows: pd.DataFrame, names: Sequence[str], numbers: Sequence[str]) -> list[dict[str, Any]]:
    """Return JSON-ready objects of the columns `names` and `numbers`, one for each row."""
    return [
        {name: str(row[name]) for name in names} | {name: _number(row[name]) for name in numbers}
        for row in rows.to_dict("records")
    ]


def _number(value: Any) -> float | None:
    """JSON has no NaN."""
    number = float(value)
    return number if math.isfinite(number) else None
