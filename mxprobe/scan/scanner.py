"""A scan: every weight of a checkpoint into a trace, one at a time; stopped, it goes on where it was.

Per weight the trace gets its `tensors` and `whatif` rows and, last, its `modules` row. Per batch of calibration inputs
it gets what `mxprobe.scan.activations` measures and, last, an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxprobe.errors import MxprobeError, UsageError
from mxprobe.events import Event, finished
from mxprobe.schema import Phase, Row
from mxprobe.trace import TraceWriter

from .activations import Activations, prepare_activations
from .checkpoint import Checkpoint, open_checkpoint
from .resume import CALIBRATED, identity_of, interrupted, take_over
from .settings import ScanSettings
from .stored_weights import ALREADY_QUANTIZED, PROBED, Weight, find_weights, settings_of_quantization
from .weight_error import measure_weight


@dataclass
class ScanResult:
    trace: Path
    n_scanned: int = 0
    n_resumed: int = 0
    """Weights of `n_scanned` that were taken over from an earlier, interrupted scan."""
    n_bytes: int = 0
    n_batches: int = 0
    """Batches of calibration inputs, those of an earlier scan included."""
    quantized: dict[str, int] = field(default_factory=dict)
    """Weights that are stored quantized, by format."""
    problems: list[str] = field(default_factory=list)
    """Sentences naming the file and the tensor that could not be read."""


@dataclass(frozen=True)
class Progress:
    """Handed to `on_progress` as the scan goes on."""

    module: str
    """The weight being measured; empty once all are, and batches of calibration inputs are run."""
    done_bytes: int
    total_bytes: int
    batch: int = 0
    n_batches: int = 0


def scan(
    path: Path,
    output: Path,
    settings: ScanSettings | None = None,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ScanResult:
    """Scan the checkpoint at `path` into a new trace at `output`, or finish an interrupted scan there.

    What cannot be read is named in `problems` (and in the trace, as events) and the rest is scanned. Role w_fwd
    has blocks along in-features, w_dgrad along out-features; phase is eval and step 0. With `settings.calibration`
    the model is built first, and each batch of inputs is a step from 1 on, see `mxprobe.scan.activations`.

    Raises:
        UsageError: nothing to scan, or a calibration without a model that can be built or inputs that can be read.
        TraceError: `output` holds another trace, or a finished one.
    """
    settings = settings or ScanSettings()
    checkpoint = open_checkpoint(path)
    weights = find_weights(checkpoint, settings.include, settings.exclude)
    if not any(weight.status in (PROBED, ALREADY_QUANTIZED) for weight in weights):
        reasons = sorted({weight.reason for weight in weights})
        raise UsageError(f"{path} holds no weight to scan", cause="; ".join(reasons[:5]))
    result = ScanResult(output, problems=list(checkpoint.problems))
    identity = identity_of(checkpoint, asdict(settings))
    activations = prepare_activations(checkpoint, weights, settings) if settings.calibration else None
    kept = interrupted(output, identity)
    run = _run(checkpoint, settings, identity)
    if activations is not None:
        run["calibration"] = activations.describe()
    writer = TraceWriter(output, run)
    try:
        done, done_steps = take_over(kept, writer, output) if kept is not None else (set[str](), set[int]())
        _write_problems(writer, result.problems)
        _measure_all(weights, done, settings, writer, result, on_progress)
        if activations is not None:
            _calibrate(activations, done_steps, writer, result, on_progress)
        writer.update_run(scan={**identity, "problems": result.problems, "quantized": result.quantized})
    except BaseException:
        writer.abandon()  # not complete: the same call continues it
        raise
    writer.close()
    return result


def _measure_all(
    weights: Sequence[Weight],
    done: set[str],
    settings: ScanSettings,
    writer: TraceWriter,
    result: ScanResult,
    on_progress: Callable[[Progress], None],
) -> None:
    pending = [weight for weight in weights if weight.module not in done]
    total = sum(weight.entry.end - weight.entry.begin for weight in pending if weight.status == PROBED)
    result.n_resumed = sum(weight.module in done and weight.status == PROBED for weight in weights)
    result.n_scanned = result.n_resumed
    for weight in weights:
        if weight.status == ALREADY_QUANTIZED:
            name = weight.reason.removeprefix("stored as ")
            result.quantized[name] = result.quantized.get(name, 0) + 1
    for weight in pending:
        if weight.status == PROBED:

            def on_bytes(count: int, module: str = weight.module) -> None:
                result.n_bytes += count
                on_progress(Progress(module, result.n_bytes, total))

            try:
                tensors, whatifs = measure_weight(weight, settings, on_bytes)
            except MxprobeError as error:
                result.problems.append(error.what)
                _write_problems(writer, [error.what])
                continue
            _append(writer, "tensors", [_key(weight, settings) | row for row in tensors])
            _append(writer, "whatif", [_key(weight, settings) | row for row in whatifs])
            result.n_scanned += 1
        _append(writer, "modules", [_module_row(weight)])


def _calibrate(
    activations: Activations,
    done: set[int],
    writer: TraceWriter,
    result: ScanResult,
    on_progress: Callable[[Progress], None],
) -> None:
    batches = activations.inputs.batches
    for step, batch in enumerate(batches, 1):
        on_progress(Progress("", result.n_bytes, result.n_bytes, step - 1, len(batches)))
        if step not in done:
            tables: dict[str, list[Row]] = {}
            for table, row in activations.measure(batch, step):
                tables.setdefault(table, []).append(finished(row))
            for table, rows in tables.items():
                _append(writer, table, rows)
            counts = {"n_sequences": len(batch.input_ids), "n_tokens": batch.n_tokens}
            said = f"{len(batch.input_ids)} sequences, {batch.n_tokens} tokens"
            _append(writer, "events", [_row_of(Event(CALIBRATED, "", "done", counts, said), step)])
        result.n_batches += 1
        on_progress(Progress("", result.n_bytes, result.n_bytes, step, len(batches)))


def _run(checkpoint: Checkpoint, settings: ScanSettings, identity: dict[str, Any]) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "kind": "scan",
        "scan": identity,
        "model": config.get("model_type", ""),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "quantization": settings_of_quantization(config),
        "format": settings.format,
        "rule": settings.rule,
    }


def _key(weight: Weight, settings: ScanSettings) -> Row:
    return {
        "step": 0,
        "micro_step": 0,
        "time_ns": time.time_ns(),
        "module": weight.module,
        "phase": str(Phase.EVAL),
        "format": settings.format,
        "rule": settings.rule,
    }


def _module_row(weight: Weight) -> Row:
    entry = weight.entry
    kind = "Experts" if len(entry.shape) == 3 else "Linear"
    return {
        "time_ns": time.time_ns(),
        "module": weight.module,
        "class_name": kind if weight.status != "not_linear" else "",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "n_parameters": entry.n_elements,
        "status": weight.status,
        "reason": weight.reason,
        # One token: how many a step will have is not in a checkpoint.
        "gemm_flops": 0.0 if "embed" in weight.module else 2.0 * entry.n_elements,
    }


def _append(writer: TraceWriter, table: str, rows: Sequence[Row]) -> None:
    if rows:
        writer.append(table, {name: [row.get(name) for row in rows] for name in rows[0]})


def _write_problems(writer: TraceWriter, problems: Sequence[str]) -> None:
    _append(writer, "events", [_row_of(Event("unreadable", text=problem)) for problem in problems])


def _row_of(event: Event, step: int = 0) -> Row:
    return {"step": step, "time_ns": time.time_ns(), **event.columns()}
