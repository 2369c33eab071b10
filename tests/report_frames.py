"""Frames of a believable run for the report's tests: numbers drawn once, sums made to satisfy the identities."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from mxprobe.attribution import (
    Agreement,
    Certainty,
    CorrectionScore,
    Coverage,
    Evidence,
    OperandGroup,
    Recommendation,
    Snippet,
    Thresholds,
)
from mxprobe.schema import DELTA_BINS, Component, Role, Verdict
from mxprobe.tables import TABLES
from mxprobe.trace.arrow import conform
from mxprobe_reports import Inputs, Rows

KINDS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
FED_BY_NORM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def module_names(n_layers: int) -> list[str]:
    return [f"model.layers.{i}.{kind}" for i in range(n_layers) for kind in KINDS]


def frame(table: str, columns: dict[str, Any]) -> pd.DataFrame:
    """A frame with all the table's columns, in the types the reader gives."""
    n = len(next(iter(columns.values()))) if columns else 0
    filled: dict[str, Any] = {}
    for name, kind in TABLES[table]:
        default: Any = "" if kind in ("dict", "string") else [] if kind.startswith("list") else 0
        values = columns.get(name, [default] * n)
        filled[name] = pd.Categorical([str(v) for v in values]) if kind == "dict" else values
    return pd.DataFrame({**filled, "rank": [0] * n})


def tensors(modules: Sequence[str], steps: Sequence[int], *, outliers: bool = True, seed: int = 0) -> pd.DataFrame:
    """Every role of every module at every step; with `outliers`, inputs behind a norm lose most values to zero."""
    rng = np.random.default_rng(seed)
    keys = [(step, module, role) for step in steps for module in modules for role in Role]
    size = len(keys)
    hit = np.array([outliers and r in (Role.X_FWD, Role.X_WGRAD) and m.endswith(FED_BY_NORM) for _, m, r in keys])
    n = np.full(size, 32768)
    x2 = n * rng.uniform(0.5, 2.0, size) * np.where(hit, 30.0, 1.0)
    nmse = np.where(hit, 0.021, 0.0134) * rng.uniform(0.95, 1.05, size)
    dead, grid = np.where(hit, 0.25, 0.025), np.where(hit, 0.2, 0.72)
    dead, grid = dead * rng.uniform(0.9, 1.1, size), grid * rng.uniform(0.97, 1.03, size)
    e2 = x2 * nmse
    scale2 = 1.7 * e2
    out_ref2 = x2 * 64
    out_error = np.where(hit, 0.6, 0.013) * rng.uniform(0.9, 1.1, size)
    out_e2 = out_ref2 * out_error
    zeroed_share = np.where(hit, 0.93, 0.05)
    hist = rng.multinomial(n[0] // 32, np.full(DELTA_BINS, 1 / DELTA_BINS), size=size)
    columns: dict[str, Any] = {
        "step": [k[0] for k in keys],
        "time_ns": [k[0] * 10**9 for k in keys],
        "module": [k[1] for k in keys],
        "role": [k[2].value for k in keys],
        "phase": ["train"] * size,
        "format": ["mxfp4"] * size,
        "rule": ["rceil"] * size,
        "sampled_frac": np.full(size, 0.5),
        "n_clusters": np.full(size, 512),
        "n": n,
        "n_blocks": n // 32,
        "n_deadzone": (n * np.where(hit, 0.6, 0.078)).astype(np.int64),
        "n_zeroed": (n * np.where(hit, 0.66, 0.107)).astype(np.int64),
        "sum_x2": x2,
        "sum_e2": e2,
        "sum_scale2": scale2,
        "sum_dz2": e2 * dead,
        "sum_grid2": e2 * grid,
        "sum_scale_grid": (e2 * (1 - dead - grid) - scale2) / 2,
        "sum_scale_dz": np.zeros(size),
        "sum_xq": x2 * 0.99,
        "sum_xqstar": x2 * 0.99,
        "sum_e2_on_d": e2 * dead,
        "sum_e2_zeroed": e2 * dead * 1.1,
        "amax": np.sqrt(x2 / n) * 4,
        "delta_hist": list(hist),
        "code_hist": [np.zeros(16, dtype=np.int64)] * size,
        "out_ref2": out_ref2,
        "out_e2": out_e2,
        "out_scale2": out_e2,
        "out_dz2": out_e2 * zeroed_share * 0.9,
        "out_grid2": out_e2 * (1 - zeroed_share) * 0.8,
        "out_zeroed2": out_e2 * zeroed_share,
    }
    return frame("tensors", columns)


def whatif(rows: pd.DataFrame) -> pd.DataFrame:
    """Two corrections on each of the `tensors` rows."""
    left = {"of:0.5": 0.25, "mbs:128": 0.85}
    shared = ["step", "time_ns", "module", "role", "phase", "format", "rule", "n", "out_ref2"]
    parts = [
        {
            **{name: rows[name].tolist() for name in shared},
            "correction": [correction] * len(rows),
            "n_zeroed": (rows["n_zeroed"] * part).astype(np.int64).tolist(),
            **{name: (rows[name] * part).tolist() for name in ("sum_e2", "sum_e2_on_d", "out_e2", "out_zeroed2")},
        }
        for correction, part in left.items()
    ]
    return pd.concat([frame("whatif", part) for part in parts], ignore_index=True)


def outputs(modules: Sequence[str], steps: Sequence[int], *, realised: float = 0.3) -> pd.DataFrame:
    """High-precision training, MXFP4 rollouts that do exactly what is predicted."""
    keys = [(step, module, phase) for step in steps for module in modules for phase in ("train", "rollout")]
    rollout = np.array([phase == "rollout" for _, _, phase in keys])
    rng = np.random.default_rng(1)
    error = np.where(rollout, realised * rng.uniform(0.5, 1.5, len(keys)), 1e-13)
    recipe = ["mxfp4+rceil" if r else "none" for r in rollout]
    columns: dict[str, Any] = {
        "step": [k[0] for k in keys],
        "module": [k[1] for k in keys],
        "phase": [k[2] for k in keys],
        "recipe_x": recipe,
        "recipe_w": recipe,
        "exact": [True] * len(keys),
        "n_rows": [512] * len(keys),
        "ref2": np.full(len(keys), 1000.0),
        "realised2": 1000.0 * error,
        "predicted2": np.where(rollout, 1000.0 * error, 0.0),
        "residual2": np.full(len(keys), 1e-9),
    }
    return frame("outputs", columns)


def signals(n_steps: int) -> pd.DataFrame:
    steps = np.arange(1, n_steps + 1)
    rng = np.random.default_rng(2)
    curves = {
        "reward_mean": ("reward", 0.55 - 0.45 * np.exp(-steps / (0.2 * n_steps))),
        "entropy": ("entropy", 0.3 + 1.1 * np.exp(-steps / (0.3 * n_steps))),
        "grad_norm": ("grad_norm", 1.0 + 2.0 * np.exp(-steps / (0.1 * n_steps))),
        "": ("num_tokens", steps * 1000.0),
    }
    parts = [
        {
            "step": steps.tolist(),
            "time_ns": (steps * 10**9).tolist(),
            "source": ["transformers.Trainer.log"] * n_steps,
            "framework": ["trl"] * n_steps,
            "raw_key": [raw] * n_steps,
            "metric": [metric] * n_steps,
            "value": values + 0.03 * rng.standard_normal(n_steps),
        }
        for metric, (raw, values) in curves.items()
    ]
    return pd.concat([frame("signals", part) for part in parts], ignore_index=True)


def modules_table(modules: Sequence[str]) -> pd.DataFrame:
    rows = [("model.embed_tokens", "Embedding", "not_linear", "not a weight GEMM", 0.0)]
    rows += [(name, "Linear", "probed", "", 1e9) for name in modules]
    rows.append(("lm_head", "Linear", "not_called", "a fused head reads lm_head.weight directly", 6e8))
    names = ("module", "class_name", "status", "reason", "gemm_flops")
    return frame("modules", dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def overhead(n_steps: int, every: int) -> pd.DataFrame:
    steps = np.arange(1, n_steps + 1)
    probed = steps % every == 0
    columns: dict[str, Any] = {
        "step": steps.tolist(),
        "time_ns": (steps * 10**9).tolist(),
        "probed": probed.tolist(),
        "step_ns": np.where(probed, 380_000_000, 60_000_000).tolist(),
        "probe_ns": np.where(probed, 320_000_000, 20_000).tolist(),
        "sent_bytes": (steps * 1_000).tolist(),
    }
    return frame("overhead", columns)


def events(n_steps: int) -> pd.DataFrame:
    columns = {"step": [3, n_steps], "time_ns": [1, 2], "kind": ["attached", "detached"], "detail": ["14 modules", ""]}
    return frame("events", columns)


def recommendation(modules: Sequence[str], *, verdict: Verdict = Verdict.ENABLE, n_steps: int = 12) -> Recommendation:
    """A recommendation as the engine shapes it, for pages that are not about the engine."""
    scores = tuple(
        CorrectionScore(
            correction=name,
            tier=tier,
            gain=gain,
            gain_low=gain - 0.06,
            gain_high=gain + 0.05,
            n_steps=n_steps,
            held_out_gain=gain - 0.02,
            recovery=recovery,
            tensor_recovery=recovery,
            cost_gemm=cost,
            bits_per_element=bits,
            cures=name == "of:0.5",
            is_active=False,
            is_eligible=gain > 0.3 and recovery > 0.5,
        )
        for name, tier, gain, recovery, cost, bits in (
            ("of:0.5", 1, 0.74, 0.75, 1.0, 8.5),
            ("nvfp4", 2, 0.79, 0.62, 0.0, 4.5),
            ("had:32", 1, 0.72, 0.41, 0.05, 4.25),
            ("mbs:32", 1, 0.47, 0.31, 0.02, 4.5),
            ("mbs:128", 1, 0.36, 0.22, 0.02, 4.3),
            ("rule:even", 1, 0.08, 0.05, 0.0, 4.25),
            ("rule:ceil", 1, -0.42, -0.5, 0.0, 4.25),
        )
    )
    shares = {"zeroed": 0.93, "saturated": 0.0, "scale": 0.1, "deadzone": 0.85, "grid": 0.05}
    where = OperandGroup(Role.X_FWD, "q_proj", tuple(modules[:1]), 0.6, Component.DEADZONE, shares)
    enable = verdict is Verdict.ENABLE
    return Recommendation(
        verdict=verdict,
        headline="Deadzone in the inputs of q, k, v, gate and up: values lost to zero make 93 % of the output error. "
        "Enable outlier fallback (α = 0.5)."
        if enable
        else "Too few steps were probed to say what the rounding does.",
        component=Component.DEADZONE if enable else Component.NONE,
        shares=shares,
        where=(where,) if enable else (),
        chosen=("of:0.5",) if enable else (),
        corrections=scores if enable else (),
        evidence=(
            Evidence("mismatch", Certainty.MEASURED, "Median mismatch over modules", 0.31, 0.002, True),
            Evidence("reward", Certainty.ASSOCIATED, "Reward stays at 0.55", 0.55),
        ),
        agreement=Agreement(0.97 if enable else None, n_steps, 200),
        coverage=Coverage(0.959, len(modules), len(modules) + 1, (("lm_head", "a fused head reads it"),)),
        thresholds=Thresholds(),
        what_would_change="A replay in which outlier fallback leaves the mismatch as it is, or a recovery below 50 %.",
        snippet=Snippet("trl", "python", "from torch import nn\n\nmodel = nn.Linear(8, 8)\n"),
        caveats=("Layers are weighted by output error: sensitivity is not measured.",),
    )


def tables(n_layers: int = 2, n_steps: int = 240, every: int = 20, **overrides: Any) -> dict[str, pd.DataFrame]:
    """All tables of a whole run, by name; `overrides` replace some."""
    names = overrides.pop("names", module_names(n_layers))
    probed = list(range(every, n_steps + 1, every))
    rows = tensors(names, probed)
    frames = {
        "tensors": rows,
        "outputs": outputs(names, probed),
        "whatif": whatif(rows),
        "signals": signals(n_steps),
        "events": events(n_steps),
        "modules": modules_table(names),
        "overhead": overhead(n_steps, every),
    }
    return {**frames, **overrides}


def sensitivity(modules: Sequence[str], *, worst: str, n_microbatches: int = 8) -> pd.DataFrame:
    """Replays in which every forward operand predicts a KL of 1e-4 nats a token, the input of `worst` of 1e-2."""
    keys = [(step, m, r) for step in range(n_microbatches) for m in modules for r in (Role.X_FWD, Role.W_FWD)]
    n_tokens = 100.0
    kl = [1e-2 if (module, role) == (worst, Role.X_FWD) else 1e-4 for _, module, role in keys]
    columns: dict[str, Any] = {
        "step": [10 * k[0] for k in keys],
        "module": [k[1] for k in keys],
        "role": [k[2].value for k in keys],
        "component": ["total"] * len(keys),
        "n_tokens": [n_tokens] * len(keys),
        "n_samples": [4] * len(keys),
        "sum_delta2": [2.0 * n_tokens * each for each in kl],
        "sum_log_prob_shift": [0.0] * len(keys),
        "sum_entropy_shift": [0.0] * len(keys),
    }
    return frame("sensitivity", columns)


def gradients(modules: Sequence[str], steps: Sequence[int], *, noise: float = 0.3) -> pd.DataFrame:
    """dW with an error of 0.02 of ||dW||^2, and halves that differ by `noise` of it."""
    parts = {"total": 0.02, "scale": 0.012, "deadzone": 0.002, "grid": 0.009}
    keys = [(step, module, part) for step in steps for module in modules for part in parts]
    half = (1.0 + noise) / 4.0  # a^2 = b^2, and a^2 + b^2 + 2 ab = 1
    columns: dict[str, Any] = {
        "step": [k[0] for k in keys],
        "module": [k[1] for k in keys],
        "gemm": ["wgrad"] * len(keys),
        "component": [k[2] for k in keys],
        "ref2": np.ones(len(keys)),
        "err2": [parts[k[2]] for k in keys],
        "ref_err": np.zeros(len(keys)),
        "half_a2": np.full(len(keys), half),
        "half_b2": np.full(len(keys), half),
        "half_ab": np.full(len(keys), (1.0 - noise) / 4.0),
    }
    return frame("gradients", columns)


def rollouts(steps: Sequence[int], *, abs_d: float = 0.2) -> pd.DataFrame:
    """100 tokens a step that differ by `abs_d` nats on average, half of them of low entropy and alike."""
    keys = [(step, stratum) for step in steps for stratum in ("all", "entropy_q1")]
    n = np.array([100 if stratum == "all" else 50 for _, stratum in keys])
    d = np.array([abs_d if stratum == "all" else 0.0 for _, stratum in keys])
    columns: dict[str, Any] = {
        "step": [k[0] for k in keys],
        "stratum": [k[1] for k in keys],
        "n_sequences": [4] * len(keys),
        "n_tokens": n,
        "sum_abs_d": n * d,
        "sum_d": n * d / 2,
        "sum_k3": n * d / 4,
        "sum_w": n * 1.0,
        "sum_w2": n * (1.0 + d),
        "n_outside_clip": (n * d).astype(np.int64),
    }
    return frame("rollouts", columns)


def rows_of(table: str, data: pd.DataFrame) -> Rows:
    """A frame with the table's columns as `Inputs` reads it."""

    def read(columns: Collection[str]) -> Iterator[Any]:
        if data.empty:
            return
        present = data[[name for name in data.columns if name in columns]]
        piece = conform(pa.Table.from_pandas(present, preserve_index=False), table, columns)
        yield piece.append_column("rank", pa.array(data["rank"].to_numpy().astype(np.int32)))

    return Rows(read)


def inputs(n_layers: int = 2, n_steps: int = 240, every: int = 20, **overrides: Any) -> Inputs:
    """A whole run; `overrides` replace fields of `Inputs`, tables as frames."""
    names = overrides.pop("names", module_names(n_layers))
    probed = list(range(every, n_steps + 1, every))
    given = {name: overrides.pop(name) for name in TABLES if name in overrides}
    frames = tables(n_layers, n_steps, every, names=names, **given)
    others = ("gradients", "sensitivity", "replays", "rollouts")
    frames = {**{name: frame(name, {}) for name in others}, **frames}
    large = {name: rows_of(name, frames.pop(name)) for name in ("tensors", "outputs", "whatif", "gradients")}
    fields: dict[str, Any] = {
        **large,
        **frames,
        "problems": (),
        "mixture": None,
        "name": "demo.mxprobe",
        "recommendation": recommendation(names, n_steps=len(probed)),
        "run": {
            "mxprobe": "0.1.0",
            "mechanism": "ptrace",
            "attach_latency_ms": 41.2,
            "pause_ms": 3.1,
            "command_line": ["mxprobe", "attach", "4242"],
            "target": {
                "pid": 4242,
                "cmdline": ["python", "train.py", "--seed", "0"],
                "python": "3.11.2",
                "torch": "2.13.0",
            },
        },
    }
    return Inputs(**{**fields, **overrides})
