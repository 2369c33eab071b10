"""A batch of real inputs through the model -> rows of the trace, by the measurement of a live run.

    tensors, whatif, outputs    X and W of each Linear's forward GEMM, on sampled rows, with the error of the product
    sensitivity                 Delta2 of each operand, for a causal language model and its own next-token log p
    replays                     KL of the model in MXFP4 against the model as it is, on the same batch

Phase is `train`: this is the forward pass that a trainer would make with these weights. A batch is a step, counted
from 1; the weights' own rows are at step 0, phase `eval`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxprobe.errors import MxprobeError, UsageError
from mxprobe.measuring.adapters.families import adapter_of
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.operands.copying import snapshot_of
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import sample_weight
from mxprobe.measuring.recipes import Recipe
from mxprobe.measuring.replay.arms import replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.sensitivity import measure_sensitivity
from mxprobe.measuring.sampling import seed_of
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Phase, TableRow

from .calibration import MAX_TOKENS, Batch, Inputs, calibration_files, read_inputs
from .checkpoint import Checkpoint
from .model import BuiltModel, build_model, first_line
from .settings import ScanSettings
from .stored_weights import PROBED, Weight

ARMS = ("q", "qstar", "qstar_dz")


class Activations:
    """Measures the Linears of a built model on one batch of inputs after the other."""

    def __init__(
        self, built: BuiltModel, modules: Mapping[str, nn.Linear], inputs: Inputs, settings: ScanSettings
    ) -> None:
        self.inputs = inputs
        self._built = built
        self._modules = modules
        self._config = AgentConfig(format=settings.format, rule=settings.rule, whatifs=settings.whatifs)
        self._recipes: dict[tuple[str, str], Recipe] = {}
        self._history = WeightHistory()

    def describe(self) -> dict[str, Any]:
        """Return what `run.json` says of the calibration."""
        return {
            "model": self._built.class_name,
            "n_modules": len(self._modules),
            "n_batches": len(self.inputs.batches),
            "n_sequences": self.inputs.n_sequences,
            "n_available": self.inputs.n_available,
            "n_tokens": self.inputs.n_tokens,
            "n_cut": self.inputs.n_cut,
            "delta2": self._built.is_causal,
        }

    def measure(self, batch: Batch, step: int) -> Iterator[TableRow]:
        """Yield (table, row) of one batch. MxprobeError when the model fails on it, or a measurement does."""
        rows: dict[str, list[TableRow]] = {}
        failures: list[str] = []
        is_token = batch.attention_mask.flatten().bool()

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                if rows.get(name):
                    return  # a module that is called several times is measured at its first call, as in a live run
                try:
                    rows[name] = list(self._rows_of_call(name, module, args, kwargs, output, step, is_token))
                except Exception as error:  # raised here it would look like an error of the model's own
                    failures.append(f"forward hook of {name}: {first_line(error)}")

            return hook

        hooks = [
            module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in self._modules.items()
        ]
        try:
            # Parameters are frozen: no graph is built. Each snapshot is measured and dropped as soon as it is taken.
            with torch.enable_grad():
                self._run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        if failures:
            raise MxprobeError("measuring the activations failed", cause=failures[0])
        for of_module in rows.values():
            yield from of_module
        if self._built.is_causal:
            yield from self._replay(batch, step)

    def _run(self, batch: Batch) -> None:
        try:
            self._built.model(**_arguments(batch))
        except Exception as error:  # a foreign forward
            raise MxprobeError(
                f"{self._built.class_name} cannot run the calibration inputs",
                cause=first_line(error),
                remedy="give other inputs, or scan without --calibration into another directory",
            ) from error

    def _rows_of_call(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        step: int,
        is_token: torch.Tensor,
    ) -> Iterator[TableRow]:
        adapter, config, seed = adapter_of(module), self._config, seed_of(step, name)
        reading = adapter.read(module, "", args, kwargs, output) if adapter is not None else ""
        if isinstance(reading, str) or not (reading.x.dim() and reading.x.numel()):
            return
        with undisturbed(reading.x.device.type):
            weight = sample_weight(module, max_features=config.max_features, seed=seed, given=reading.weight)
            if weight is None:
                return
            snapshot = snapshot_of(
                reading,
                weight,
                module=name,
                phase=Phase.TRAIN,
                step=step,
                micro_step=0,
                seed=seed,
                max_rows=config.max_rows,
            )
        if _drop_padding(snapshot, is_token):
            yield from measure_step([snapshot], config, recipes=self._recipes, history=self._history)

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


def prepare_activations(checkpoint: Checkpoint, weights: Sequence[Weight], settings: ScanSettings) -> Activations:
    """Build the model of a checkpoint and read the inputs of `settings.calibration`.

    Raises:
        UsageError: the model cannot be built, no scanned weight is a Linear's, or the inputs cannot be read.
    """
    files = calibration_files(Path(settings.calibration))
    built = build_model(checkpoint, weights)
    modules = built.linears({weight.module for weight in weights if weight.status == PROBED})
    if not modules:
        raise UsageError(
            f"no weight that is scanned belongs to an nn.Linear of {built.class_name}",
            cause="its layers are of another kind (Conv1D, fused experts), or the globs leave all of them out",
            remedy="widen --include, or scan without --calibration",
        )
    inputs = read_inputs(
        files,
        built.tokenize,
        n_batches=settings.calibration_batches,
        vocabulary=built.vocabulary,
        max_tokens=min(built.max_tokens, MAX_TOKENS),
    )
    return Activations(built, modules, inputs, settings)


def _arguments(batch: Batch) -> dict[str, torch.Tensor]:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _drop_padding(snapshot: Snapshot, real: torch.Tensor) -> bool:
    """Leave the rows of padding tokens out, where rows are the batch's positions; False when none is left."""
    if snapshot.n_rows == real.numel():  # else routed tokens, pooled sequences: which rows are padding is not known
        snapshot.keep(real)
    return snapshot.x.shape[0] > 0
