"""A batch of real inputs through the model -> rows of the trace, by the hooks and the measurement of the agent.

    tensors, whatif, outputs    X and W of each Linear's forward GEMM, on sampled rows, with the error of the product
    sensitivity                 Delta2 of each operand, for a causal language model and its own next-token log p
    replays                     KL of the model in MXFP4 against the model as it is, on the same batch

Phase is `train`: this is the forward pass that a trainer would make with these weights. A batch is a step, counted
from 1; the weights' own rows are at step 0, phase `eval`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.errors import MxprobeError
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.recipes import Recipe
from mxprobe.measuring.replay.arms import replay_arms
from mxprobe.measuring.replay.call import capture
from mxprobe.measuring.replay.sensitivity import measure_sensitivity
from mxprobe.measuring.sampling import seed_of
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.schema import TableRow

from .calibration import Batch
from .model import BuiltModel, first_line

ARMS = ("q", "qstar", "qstar_dz")


class Activations:
    """Watches the Linears of a built model. `measure` one batch after the other; `close` takes the hooks off."""

    def __init__(self, built: BuiltModel, modules: Mapping[str, nn.Linear], config: AgentConfig) -> None:
        self._built = built
        self._modules = modules
        self._config = config
        self._clock = Clock()
        self._failures: list[str] = []
        self._guard = Guard(0, lambda where, detail: self._failures.append(f"{where}: {detail}"), lambda: None)
        self._recipes: dict[tuple[str, str], Recipe] = {}
        self._history = WeightHistory()
        self._rows: list[TableRow] = []
        self._mask = torch.ones(0, dtype=torch.bool)
        self._probes = [
            ModuleProbe(
                name,
                module,
                clock=self._clock,
                guard=self._guard,
                submit=self._on_snapshot,
                max_rows=config.max_rows,
                max_features=config.max_features,
                trains=True,
            )
            for name, module in modules.items()
        ]

    def measure(self, batch: Batch, step: int) -> Iterator[TableRow]:
        """(table, row) of one batch. MxprobeError when the model fails on it, or a measurement does."""
        self._clock.step, self._clock.with_weights = step, True
        self._mask = batch.attention_mask.flatten().bool()
        for probe in self._probes:
            probe.arm()
        # Parameters are frozen: no graph is built, and each snapshot is measured and dropped as soon as it is taken.
        with torch.enable_grad():
            self._run(batch)
        for probe in self._probes:
            probe.finish_step()
        if self._failures:
            raise MxprobeError("measuring the activations failed", cause=self._failures[0])
        rows, self._rows = self._rows, []
        yield from rows
        if self._built.is_causal:
            yield from self._replay(batch, step)

    def close(self) -> None:
        for probe in self._probes:
            probe.remove()

    def _run(self, batch: Batch) -> None:
        try:
            self._built.model(**_arguments(batch))
        except Exception as error:  # a foreign forward
            raise MxprobeError(
                f"{self._built.class_name} cannot run the calibration inputs",
                cause=first_line(error),
                remedy="give other inputs, or scan without --calibration into another directory",
            ) from error

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if not _drop_padding(snapshot, self._mask):
            return
        self._rows += measure_step([snapshot], self._config, recipes=self._recipes, history=self._history)

    def _replay(self, batch: Batch, step: int) -> Iterator[TableRow]:
        config, model = self._config, self._built.model
        when = {
            "step": step,
            "micro_step": 0,
            "time_ns": time.time_ns(),
            "format": config.format,
            "rule": config.rule,
        }
        # The log-probability of a token is read at the position before it.
        counted = torch.zeros_like(batch.attention_mask, dtype=torch.float32)
        counted[:, :-1] = batch.attention_mask[:, 1:].float()
        call = capture(model, (), _arguments(batch) | {"use_cache": False})
        embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        embedding.weight.requires_grad_(True)  # every Linear's output then carries a gradient
        try:
            remaining = set(self._modules)
            while remaining:
                found = measure_sensitivity(
                    call,
                    self._modules,
                    mask=counted,
                    record=remaining,
                    format=config.format,
                    rule=config.rule,
                    seed=seed_of(step, "calibration"),
                )
                yield from (("sensitivity", when | row) for row in found.rows())
                remaining &= found.skipped
        finally:
            embedding.weight.requires_grad_(False)
        arms = replay_arms(call, self._modules, ARMS, mask=counted, format=config.format, rule=config.rule)
        yield from (("replays", when | {"n_modules": len(self._modules)} | arm.row()) for arm in arms)


def _arguments(batch: Batch) -> dict[str, torch.Tensor]:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _drop_padding(snapshot: Snapshot, real: torch.Tensor) -> bool:
    """Leave the rows of padding tokens out, where rows are the batch's positions; False when none is left."""
    if snapshot.n_rows == real.numel():  # else routed tokens, pooled sequences: which rows are padding is not known
        snapshot.keep(real)
    return snapshot.x.shape[0] > 0
