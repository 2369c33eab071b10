"""Planted faults in the trained small language model, recorded as a trace: what the verdict has to find in a run.

The trainer computes in high precision, the rollout with the weights of the planted layers in MXFP4. A plant projects a
weight so that rounding it makes an error of one kind only; the model with the planted weights is its own reference.

    scale      on the E2M1 grid of scales mu 2^k, one mu per macro block: an ideal scale loses nothing
    deadzone   one channel per block at 6 2^k, whose input is 0; all else on the grid or under a quarter of the scale
    grid       block maximum at 6 2^k, nothing in the deadzone, the rest between codes
    clean      on the grid
    stale      not projected; the trainer goes on learning, the rollout keeps MXFP4 of the weights it began with
    stale_scale   both: projected as `scale`, then as `stale`
    natural    not projected, rounded to bfloat16, which puts one element in a hundred on a tie of the grid
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mxprobe_kernels
from mxprobe.attribution import Recommendation
from mxprobe.measuring.recipes import Call, infer_recipe
from mxprobe.schema import Component, Phase, Role, Verdict
from mxprobe.trace import TraceWriter
from tests import small_lm
from tests.planted import BLOCK, MACRO_BLOCK
from tests.synthetic import WHATIFS, columns_of, operand_rows

KINDS = ("scale", "deadzone", "grid", "clean", "stale")
EXTENTS = ("all", "half")
PART_OF = {"all": 1, "half": 2, "one": 10**6}
COMPONENTS = {"scale": Component.SCALE, "deadzone": Component.DEADZONE, "grid": Component.GRID}
MENDS = {
    "scale": {"mbs:32", "mbs:64", "mbs:128"},
    "deadzone": {"of:0.5", "of:1.0"},
    "grid": {"of:0.5", "of:1.0", "nvfp4", "mxfp8", "keep_high_precision"},
}
ACTS = (Verdict.ENABLE, Verdict.UNDECIDED, Verdict.KEEP_HIGH_PRECISION)
SAMPLES = 6
UPDATES_PER_STEP = 4
QuantizeWeight = Callable[[torch.Tensor], torch.Tensor]


def mxfp4(w: torch.Tensor) -> torch.Tensor:
    return mxprobe_kernels.quantize_dequantize(w)[0]


def planted_weight(w: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """W [O, K] with the fault `kind`; K a multiple of 32."""
    if kind in ("clean", "stale", "natural"):
        return {"clean": mxfp4, "natural": lambda w: w.bfloat16().float()}.get(kind, torch.clone)(w)
    rows, width = w.shape
    blocks = w.reshape(rows, -1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    largest = blocks.abs().argmax(-1, keepdim=True)
    six = 6.0 * torch.sign(blocks.gather(-1, largest))
    if kind in ("scale", "stale_scale"):
        macros = -(-width // MACRO_BLOCK)
        mu = torch.rand(rows, macros, 1, generator=generator) * 0.3 + 1.05
        mu = mu.repeat_interleave(MACRO_BLOCK // BLOCK, 1)[:, : blocks.shape[1]]
        s = mu * 2.0 ** torch.round(torch.log2(amax / 6.0 / mu))
        z = nearest_code(blocks / s).scatter(-1, largest, six)
        z = torch.where(z.abs() == 0.5, torch.sign(z), z)
    elif kind == "grid":
        s = 2.0 ** torch.ceil(torch.log2(amax / 6.0))
        z = blocks / s
        lifted = torch.sign(z) * (0.55 + 0.4 * torch.rand(z.shape, generator=generator))
        z = torch.where(z.abs() < 0.5, lifted, z).scatter(-1, largest, six)
    else:
        s = 2.0 ** (torch.ceil(torch.log2(amax / 6.0)) + 2.0)
        z = blocks / s
        code = nearest_code(z)
        z = torch.where(code == 0, z, code)
        z[..., 0] = 6.0
    return (z * s).reshape(w.shape)


def nearest_code(z: torch.Tensor) -> torch.Tensor:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.sign(z) * grid[(z.abs()[..., None] - grid).abs().argmin(-1)]


def is_right(kind: str, answer: Recommendation, planted: set[str]) -> bool:
    """Verdict, component, first correction, modules and operand of a plant of that kind."""
    if kind == "clean":
        return answer.verdict in (Verdict.NONE_NEEDED, Verdict.NOTHING_QUANTIZED)
    if kind == "stale":
        return answer.verdict is Verdict.NOT_EXPLAINED
    named = {module for group in answer.where for module in group.modules}
    return (
        answer.verdict in ACTS
        and answer.component is COMPONENTS[kind]
        and answer.chosen[0] in MENDS[kind]
        and named <= planted
        and {group.role for group in answer.where} == {Role.W_FWD}
    )


def names_a_wrong_component(kind: str, answer: Recommendation) -> bool:
    return answer.verdict in ACTS and answer.component is not COMPONENTS.get(kind)


def write_planted(
    directory: Path,
    kind: str,
    *,
    extent: str = "all",
    seed: int = 0,
    steps: int = 8,
    train: QuantizeWeight | None = None,
    rollout: QuantizeWeight = mxfp4,
    elsewhere: QuantizeWeight | None = None,
    rollout_x: QuantizeWeight | None = None,
    kind_elsewhere: str = "clean",
    gradient: str = "",
) -> tuple[Path, set[str]]:
    """Record the run; returns its trace and the planted modules.

    train, rollout: how each side rounds W; elsewhere: how the rollout does in modules that are not planted;
    rollout_x: how it rounds X. kind_elsewhere: what is planted in the others. gradient: what is planted in the
    gradients at the outputs, of which operand rows are written then.
    """
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(small_lm.trained())
    modules = small_lm.linears(model)
    order = torch.randperm(len(modules), generator=generator).tolist()
    chosen = {list(modules)[i] for i in order[: max(len(modules) // PART_OF[extent], 1)]}
    with torch.no_grad():
        for name, module in modules.items():
            kind_here = kind if name in chosen else kind_elsewhere
            module.weight.copy_(planted_weight(module.weight, kind_here, generator))
    if kind == "deadzone":
        for name in chosen:
            modules[name].register_forward_pre_hook(_without_first_channels)
    first = {name: module.weight.detach().clone() for name, module in modules.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with TraceWriter(directory, {"config": {"rule": "rceil"}}) as writer:
        for step in range(1, steps + 1):
            is_stale = kind.startswith("stale")
            if is_stale:
                _learn(model, optimizer, first.keys() - chosen, modules, first, seed * 1000 + step)
            now = {name: module.weight.detach() for name, module in modules.items()}
            used = {name: first[name] if is_stale else now[name] for name in modules}
            rounds = {name: rollout if name in chosen else elsewhere or rollout for name in modules}
            sides = (
                (Phase.TRAIN, {name: train(w) if train else w for name, w in now.items()}, None),
                (Phase.ROLLOUT, {name: rounds[name](w) for name, w in used.items()}, rollout_x),
            )
            _write_step(writer, model, modules, sides, step, seed)
            if gradient:
                _write_gradients(writer, modules, gradient, step, generator)
    return directory, chosen


def _without_first_channels(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    x = args[0].clone()
    x[..., ::BLOCK] = 0.0
    return (x,)


def _learn(model: Any, optimizer: Any, frozen: set[str], modules: Any, first: Any, seed: int) -> None:
    for i in range(UPDATES_PER_STEP):
        ids = small_lm.batch(24, seed=seed * UPDATES_PER_STEP + i)
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name in frozen:
                modules[name].weight.copy_(first[name])


def _write_step(writer: TraceWriter, model: Any, modules: Any, sides: Any, step: int, seed: int) -> None:
    outputs: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    whatif: list[dict[str, Any]] = []
    for phase, weights, quantize_x in sides:
        ids = small_lm.batch(SAMPLES, seed=10**7 + 1000 * seed + 2 * step + (phase is Phase.ROLLOUT))
        for name, (x, y) in _run(model, modules, weights, ids, quantize_x).items():
            key = {"step": step, "micro_step": 0, "time_ns": step, "module": name}
            w = modules[name].weight.detach()
            (recipe_x, recipe_w), sums = infer_recipe(Call(x, w, y))
            facts = {"phase": phase.value, "recipe_x": recipe_x, "recipe_w": recipe_w, "sampled_frac": 1.0}
            outputs.append({**key, **facts, "n_rows": len(x), **sums})
            if phase is Phase.TRAIN:
                for role, a, b in ((Role.X_FWD, x, w.T), (Role.W_FWD, w, x.T)):
                    place = {**key, "role": role.value, "phase": phase.value, "format": "mxfp4", "rule": "rceil"}
                    row, after = operand_rows(a, b)
                    tensors.append({**place, "sampled_frac": 1.0, "n_clusters": len(a), **row})
                    whatif += [{**place, "sampled_frac": 1.0, "n_clusters": len(a), **each} for each in after]
    assert len(whatif) == len(WHATIFS) * len(tensors)
    for table, rows in (("outputs", outputs), ("tensors", tensors), ("whatif", whatif)):
        writer.append(table, columns_of(rows))


@torch.no_grad()
def _write_gradients(writer: TraceWriter, modules: Any, kind: str, step: int, generator: torch.Generator) -> None:
    """`tensors` rows of g_dgrad: gradients [64, O] of tokens of many sizes."""
    rows: list[dict[str, Any]] = []
    for name, module in modules.items():
        g = torch.randn(64, module.out_features, generator=generator)
        g = planted_weight(g * 2.0 ** torch.randint(-30, -5, (64, 1), generator=generator), kind, generator)
        place = {"step": step, "micro_step": 0, "time_ns": step, "module": name, "role": Role.G_DGRAD.value}
        place |= {"phase": Phase.TRAIN.value, "format": "mxfp4", "rule": "rceil", "sampled_frac": 1.0, "n_clusters": 64}
        rows.append({**place, **operand_rows(g, module.weight.detach())[0]})
    writer.append("tensors", columns_of(rows))


@torch.no_grad()
def _run(
    model: Any, modules: Any, weights: dict[str, torch.Tensor], ids: torch.Tensor, quantize_x: QuantizeWeight | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) [rows, ...] of each module in a forward pass with these weights."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def compute(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            y = F.linear(quantize_x(args[0]) if quantize_x else args[0], weights[name])
            seen[name] = args[0].flatten(0, 1), y.flatten(0, 1)
            return y

        return compute

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    model(ids)
    for handle in handles:
        handle.remove()
    return seen
