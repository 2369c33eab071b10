"""A scan: every weight of a checkpoint into a trace, one at a time; stopped, it goes on where it was.

Per weight the trace gets its `tensors` and `whatif` rows and, last, its `modules` row: a weight with a `modules`
row is done. To resume, the rows of done weights are copied into a new trace in the same place, since a trace has
one writer in its life.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mxprobe.emulation.recipe import DEFAULT_EXCLUDE
from mxprobe.errors import MxprobeError, UsageError
from mxprobe.schema import TABLES, Phase
from mxprobe.trace import Trace, TraceWriter, open_trace
from mxprobe_kernels.formats import DEFAULT_WHATIFS, Correction, get_format, get_rule

from .checkpoint import Checkpoint, open_checkpoint
from .measure import MeasureSettings, Row, measure_weight
from .safetensors_file import BITS
from .weights import ALREADY_QUANTIZED, PROBED, Weight, find_weights, settings_of_quantization

_DATA_TABLES = ("tensors", "whatif", "modules")


@dataclass(frozen=True)
class ScanSettings:
    """What is measured. Raises UsageError for names that do not exist."""

    format: str = "mxfp4"
    rule: str = "rceil"
    whatifs: tuple[str, ...] = DEFAULT_WHATIFS
    whatif_elements: int = 65_536
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE

    def __post_init__(self) -> None:
        try:
            get_format(self.format)
            get_rule(self.rule)
            for name in self.whatifs:
                Correction.parse(name)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.whatif_elements < 1:
            raise UsageError("what-ifs need at least one element per weight; leave them out with no what-ifs at all")

    def measuring(self) -> MeasureSettings:
        return MeasureSettings(self.format, self.rule, self.whatifs, self.whatif_elements)


@dataclass
class ScanResult:
    trace: Path
    n_scanned: int = 0
    n_resumed: int = 0
    """Of those, taken over from an earlier, interrupted scan."""
    n_bytes: int = 0
    quantized: dict[str, int] = field(default_factory=dict)
    """Weights that are stored quantized, by format."""
    problems: list[str] = field(default_factory=list)
    """Sentences naming the file and the tensor that could not be read."""


@dataclass(frozen=True)
class Progress:
    """Handed to `on_progress` as the scan goes on."""

    module: str
    done_bytes: int
    total_bytes: int


def scan(
    path: Path,
    output: Path,
    settings: ScanSettings | None = None,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ScanResult:
    """Scan the checkpoint at `path` into a new trace at `output`, or finish an interrupted scan there.

    What cannot be read is named in `problems` (and in the trace, as events) and the rest is scanned. Role w_fwd
    has blocks along in-features, w_dgrad along out-features; phase is eval and step 0.

    Raises:
        UsageError: nothing to scan.
        TraceError: `output` holds another trace, or a finished one.
    """
    settings = settings or ScanSettings()
    checkpoint = open_checkpoint(path)
    weights = find_weights(checkpoint, settings.include, settings.exclude)
    if not any(weight.status in (PROBED, ALREADY_QUANTIZED) for weight in weights):
        reasons = sorted({weight.reason for weight in weights})
        raise UsageError(f"{path} holds no weight to scan", cause="; ".join(reasons[:5]))
    result = ScanResult(output, problems=list(checkpoint.problems))
    identity = _identity(checkpoint, settings)
    kept = _interrupted(output, identity)
    writer = TraceWriter(output, _run(checkpoint, settings, identity))
    try:
        done = _take_over(kept, writer, output) if kept is not None else set[str]()
        _write_problems(writer, result.problems)
        _measure_all(weights, done, settings, writer, result, on_progress)
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
    total = sum(_size_bytes(weight) for weight in pending if weight.status == PROBED)
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
                tensors, whatifs = measure_weight(weight, settings.measuring(), on_bytes)
            except MxprobeError as error:
                result.problems.append(error.what)
                _write_problems(writer, [error.what])
                continue
            _append(writer, "tensors", [_key(weight, settings) | row for row in tensors])
            _append(writer, "whatif", [_key(weight, settings) | row for row in whatifs])
            result.n_scanned += 1
        _append(writer, "modules", [_module_row(weight)])


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


def _identity(checkpoint: Checkpoint, settings: ScanSettings) -> dict[str, Any]:
    """What must be equal for a scan to be continued: files and settings, as JSON gives them back."""
    identity = {"checkpoint": str(checkpoint.path.resolve()), "files": checkpoint.fingerprint, **asdict(settings)}
    return json.loads(json.dumps(identity))


def _backup(output: Path) -> Path:
    return output.with_name(f"{output.name}.resuming")


def _interrupted(output: Path, identity: dict[str, Any]) -> Trace | None:
    """The unfinished scan to continue, moved out of the way; None when there is none.

    A scan killed while it took over an earlier one leaves the earlier one in the backup, which then counts.
    """
    backup = _backup(output)
    source = backup if backup.is_dir() else output
    if not source.is_dir() or not any(source.iterdir()):
        return None
    trace = open_trace(source)
    recorded = trace.run.get("scan")
    if trace.is_complete or trace.is_live or not isinstance(recorded, dict):
        return None  # the writer says in words that the place is taken
    differing = [key for key in identity if recorded.get(key) != identity[key]]
    if differing:
        raise UsageError(
            f"{output} holds an unfinished scan of something else ({', '.join(differing)} differ)",
            cause="the checkpoint has changed, or other options were given",
            remedy="repeat the options of that scan, choose another directory with -o, or remove that one",
        )
    if source is output:
        output.rename(backup)
    elif output.is_dir():
        shutil.rmtree(output)
    return open_trace(backup)


def _take_over(earlier: Trace, writer: TraceWriter, output: Path) -> set[str]:
    """Copy the rows of done weights; returns their modules."""
    done = set(earlier.modules()["module"].astype(str))
    for table in _DATA_TABLES:
        frame = earlier.table(table)
        frame = frame[frame["module"].astype(str).isin(sorted(done))]
        if not frame.empty:
            writer.append(table, {name: _plain(frame[name], kind) for name, kind in TABLES[table]})
    shutil.rmtree(_backup(output))
    return done


def _plain(column: pd.Series, kind: str) -> list[Any]:
    """A column as Python values, missing ones None, integers whole again."""
    if kind.startswith("list"):
        return [None if values is None else [int(value) for value in values] for values in column]
    missing = column.isna()
    cast: Callable[[Any], Any] = {"int64": int, "int32": int, "float64": float, "bool": bool}.get(kind, str)
    return [None if gone else cast(value) for value, gone in zip(column, missing, strict=True)]


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


def _size_bytes(weight: Weight) -> int:
    return weight.entry.n_elements * BITS[weight.entry.dtype] // 8


def _append(writer: TraceWriter, table: str, rows: Sequence[Row]) -> None:
    if rows:
        writer.append(table, {name: [row.get(name) for row in rows] for name in rows[0]})


def _write_problems(writer: TraceWriter, problems: Sequence[str]) -> None:
    _append(
        writer,
        "events",
        [{"step": 0, "time_ns": time.time_ns(), "kind": "unreadable", "detail": problem} for problem in problems],
    )
