"""Small realistic traces: real tensors through the real kernels, written by the real writer.

A run is a stack of Linears with Gaussian inputs, optionally with one function-preserving outlier channel per
block (x * c, W / c), whose weights drift from step to step. `train` and `rollout` say what each side computes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxprobe.measuring.operands.operand import Operand, measure_operand
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.measuring.recipes import Call, infer_recipe, quantize
from mxprobe.metrics import canonicalize
from mxprobe.schema import Phase, Role
from mxprobe.trace import TraceWriter

HIDDEN = 64
ROWS = 64
KINDS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
FED_BY_NORM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WHATIFS = ("rule:floor", "rule:even", "mbs:32", "mbs:128", "of:0.5", "of:1.0", "had:32", "nvfp4", "mxfp8")
STALE = "stale"
"""As a rollout: MXFP4 of the weights of the first step."""


@dataclass(frozen=True)
class Run:
    """What a synthetic run does. Recipes as in table `outputs`: `none`, `mxfp4+rceil`, ..., or `stale`."""

    train: str = "none"
    rollout: str | None = "mxfp4+rceil"
    """None: generation is not seen."""
    outlier_gain: float = 1.0
    """Size of one channel per block at the inputs of q, k, v, gate and up; the weights take it back."""
    steps: int = 8
    layers: int = 1
    drift: float = 0.15
    """Relative change of W per step."""
    seed: int = 0
    rule: str = "rceil"
    whatifs: tuple[str, ...] = WHATIFS
    has_operands: bool = True


HEALTHY = Run(train="mxfp4+rceil")
OUTLIERS = Run(outlier_gain=32.0)
STALE_WEIGHTS = Run(outlier_gain=32.0, rollout=STALE, drift=0.4)
HIGH_PRECISION = Run(rollout="none")


def module_names(run: Run) -> list[str]:
    return [f"model.layers.{layer}.{kind}" for layer in range(run.layers) for kind in KINDS]


def write_trace(directory: Path, run: Run, *, close: bool = True, **facts: Any) -> Path:
    """Write the trace of a run; unclosed traces keep their live files, as a killed writer leaves them."""
    writer = TraceWriter(directory, {"config": {"rule": run.rule}, "framework": "trl", **facts})
    _write_modules(writer, run)
    for step in range(1, run.steps + 1):
        tensors: list[dict[str, Any]] = []
        whatif: list[dict[str, Any]] = []
        outputs: list[dict[str, Any]] = []
        for name in module_names(run):
            x, w, first = _operands(run, name, step)
            key = {"step": step * 10, "micro_step": 0, "time_ns": 1_700_000_000 * 10**9 + step, "module": name}
            outputs += [{**key, **row} for row in _output_rows(run, x, w, first)]
            if run.has_operands:
                for role, a, b in ((Role.X_FWD, x, w.T), (Role.W_FWD, w, x.T)):
                    place = {**key, "role": role.value, "phase": Phase.TRAIN.value, "format": "mxfp4"}
                    shared = {**place, "rule": run.rule, "sampled_frac": 1.0, "n_clusters": len(a)}
                    row, after = operand_rows(a, b, rule=run.rule, whatifs=run.whatifs)
                    tensors.append({**shared, **row})
                    whatif += [{**shared, **each} for each in after]
        for table, rows in (("tensors", tensors), ("whatif", whatif), ("outputs", outputs)):
            if rows:
                writer.append(table, columns_of(rows))
        writer.append("signals", canonicalize(_signals(step)))
        writer.append(
            "overhead",
            {"step": [step * 10], "time_ns": [step], "probed": [True], "step_ns": [10**8], "probe_ns": [10**6]},
        )
    if close:
        writer.close()
    return directory


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def operand_rows(
    a: torch.Tensor, b: torch.Tensor, *, rule: str = "rceil", whatifs: tuple[str, ...] = WHATIFS
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Values of a `tensors` row and its `whatif` rows for A [M, C] quantized along C in the product A B."""
    operand = Operand(Role.X_FWD, a[None], b[None], sampled_frac=1.0, n_clusters=len(a))
    measured = measure_operand(operand, format="mxfp4", rule=rule)
    return measured.row, next(measure_corrections([measured], whatifs), [])


def _operands(run: Run, name: str, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [ROWS, HIDDEN], this step's W and the first step's W [HIDDEN, HIDDEN]."""
    fixed = torch.Generator().manual_seed(run.seed * 1000 + zlib.crc32(name.encode()) % 997)
    first = torch.randn(HIDDEN, HIDDEN, generator=fixed) / HIDDEN**0.5
    direction = torch.randn(HIDDEN, HIDDEN, generator=fixed) / HIDDEN**0.5
    fresh = torch.Generator().manual_seed(run.seed * 100_000 + step * 1000 + zlib.crc32(name.encode()) % 997)
    x = torch.randn(ROWS, HIDDEN, generator=fresh)
    w = first + run.drift * step * direction
    channels = torch.ones(HIDDEN)
    if name.endswith(FED_BY_NORM):
        channels[5::32] = run.outlier_gain
    return x * channels, w / channels, first / channels


def _output_rows(run: Run, x: torch.Tensor, w: torch.Tensor, first: torch.Tensor) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for phase, recipe in ((Phase.TRAIN, run.train), (Phase.ROLLOUT, run.rollout)):
        if recipe is None:
            continue
        used_x = x if phase is Phase.TRAIN else x[ROWS // 2 :]
        how = "mxfp4+rceil" if recipe == STALE else recipe
        y = quantize(used_x, how) @ quantize(first if recipe == STALE else w, how).T
        sides, sums = infer_recipe(Call(used_x, w, y))
        rows.append(
            {
                "phase": phase.value,
                "recipe_x": sides[0],
                "recipe_w": sides[1],
                "n_rows": len(used_x),
                "sampled_frac": 1.0,
                **sums,
            }
        )
    return rows


def _signals(step: int) -> dict[str, list[Any]]:
    values = {"reward": 0.05 * step, "entropy": 3.0 / step, "grad_norm": 1.0, "eval_reward": 0.5}
    n = len(values)
    return {
        "step": [step * 10] * n,
        "time_ns": [step] * n,
        "source": ["transformers.Trainer.log"] * n,
        "framework": ["trl"] * n,
        "raw_key": list(values),
        "value": list(values.values()),
    }


def _write_modules(writer: TraceWriter, run: Run) -> None:
    probed = module_names(run)
    names = [*probed, "model.embed_tokens", "lm_head"]
    statuses = ["probed"] * len(probed) + ["not_linear", "not_called"]
    n = len(names)
    writer.append(
        "modules",
        {
            "time_ns": [0] * n,
            "module": names,
            "class_name": ["Linear"] * len(probed) + ["Embedding", "Linear"],
            "dtype": ["float32"] * n,
            "shape": [[HIDDEN, HIDDEN]] * n,
            "n_parameters": [HIDDEN * HIDDEN] * n,
            "status": statuses,
            "reason": [""] * len(probed) + ["no GEMM", "never called in training: a fused head reads its weight"],
            "train_rows": [ROWS] * n,
            "rollout_rows": [ROWS] * n,
            "gemm_flops": [2.0 * ROWS * HIDDEN * HIDDEN] * len(probed) + [0.0, 2.0 * ROWS * HIDDEN * HIDDEN],
        },
    )
