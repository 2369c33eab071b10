"""Both sides' log-probabilities of a training batch, as a framework holds them: rows of table `rollouts`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from mxprobe.events import LOGPROBS, Event, Tell
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.measuring.tokens.mismatch import UNKNOWN, Pairs, coarsest, table_rows
from mxprobe.schema import TableRow

PerToken = Any
"""A padded tensor [B, T], a tensor [n] without boundaries, a `Ragged`, or a list of tensors [n_i]."""


class Ragged(NamedTuple):
    """A jagged nested tensor, taken apart: rows are values[offsets[i] : offsets[i + 1]]."""

    values: torch.Tensor
    offsets: torch.Tensor


class Batch(NamedTuple):
    """Tensors of one call, not yet copied. Only the two log-probabilities must be there for a measurement."""

    rollout: PerToken
    train: PerToken
    mask: list[PerToken]
    """Tokens count where all of these are non-zero. Per token or per sequence."""
    advantage: Any
    """One number a token, or [B] one a sequence."""
    version: Any = None
    """Version of the policy that drew each token, or each sequence."""
    version_now: int | None = None
    """Version of the trainer's policy."""


class BatchMeasurement:
    """The batches of a step; `rows` waits for the device and belongs to the worker."""

    def __init__(self, source: str, batches: list[Batch], step: int, computed_in: torch.dtype | None) -> None:
        first = _a_tensor(batches[0].rollout)
        self.device = torch.device("cpu") if first is None else first.device
        self.ready = event_now(self.device)
        self._source = source
        self._batches = batches
        self._step = step
        self._computed_in = computed_in
        self._time_ns = time.time_ns()

    def rows(self, tell: Tell) -> list[TableRow]:
        """Return (table, row) of `rollouts` and `signals`; none, and an event, where the tensors do not fit."""
        try:
            pairs = join([tokens_of(batch) for batch in self._batches])
        except ValueError as reason:
            tell(Event(LOGPROBS, self._source, "not_measured", text=f"{self._source}: not measured: {reason}"))
            return []
        if not len(pairs.log_prob_rollout):
            return []
        if torch.equal(pairs.log_prob_rollout, pairs.log_prob_train):
            same = "both sides hold the same numbers, as where the rollout's replace the trainer's"
            tell(Event(LOGPROBS, self._source, "same_numbers", text=f"{self._source}: {same}"))
        when = {"step": self._step, "time_ns": self._time_ns}
        signals = f"mxprobe[{self._source}]"
        nan, dtype = float("nan"), self._dtype()
        return list(table_rows(pairs, when, self._source, signal_source=signals, temperature=nan, dtype=dtype))

    def _dtype(self) -> str:
        tensors = [_a_tensor(side) for batch in self._batches[:1] for side in (batch.rollout, batch.train)]
        return coarsest([self._computed_in, *(tensor.dtype for tensor in tensors if tensor is not None)])


def tokens_of(batch: Batch) -> Pairs:
    """Read the counted tokens of a batch from the device. ValueError where its tensors do not fit together."""
    rollout, train = _sequences(batch.rollout), _sequences(batch.train)
    if rollout is None or train is None:
        raise ValueError("its log-probabilities are no plain tensors")
    sizes = [len(each) for each in rollout]
    if [len(each) for each in train] != sizes:
        raise ValueError("rollout and trainer have log-probabilities of different shapes (sharded over sequences?)")
    counted = torch.ones(sum(sizes), dtype=torch.bool)
    for each in batch.mask or (None,):
        mask = _per_token(each, sizes)
        if mask is None:
            raise ValueError("its mask has another shape than its log-probabilities")
        counted &= mask != 0
    n_rows = len(sizes) if _has_boundaries(batch.rollout) else 0
    row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    position = length = None
    if n_rows:
        lengths = torch.zeros(n_rows, dtype=torch.int64).index_add_(0, row, counted.long())
        before = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]))
        position, length = counted.long().cumsum(0) - 1 - before[row], lengths[row]
    advantage = _per_token(batch.advantage, sizes)
    version = _per_token(batch.version, sizes)
    lag = None
    if version is not None and batch.version_now is not None:
        lag = (batch.version_now - version.long()).clamp(min=UNKNOWN)
        lag[version < 0] = UNKNOWN
    pairs = Pairs(
        torch.cat(rollout).double(),
        torch.cat(train).double(),
        n_rows,
        advantage=advantage,
        position=position,
        length=length,
        lag=lag,
    )
    return pairs.take(counted)


def join(parts: list[Pairs]) -> Pairs:
    """Join microbatches of one step. What one of them lacks is not known of the whole."""
    columns: dict[str, Any] = {}
    for name in Pairs._fields:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], int):
            columns[name] = sum(values)
        else:
            columns[name] = None if any(value is None for value in values) else torch.cat(values)
    return Pairs(**columns)


def _sequences(value: Any) -> list[torch.Tensor] | None:
    """Return [n_i] each, on the CPU."""
    if isinstance(value, Ragged):
        ends = value.offsets.cpu().tolist()
        values = value.values.cpu()
        return [values[begin:end] for begin, end in zip(ends, ends[1:])]
    if isinstance(value, torch.Tensor):
        return [value.cpu()] if value.dim() == 1 else list(value.cpu().unbind(0)) if value.dim() == 2 else None
    if isinstance(value, list):
        parts: list[Any] = value
        return [part.cpu().reshape(-1) for part in parts if isinstance(part, torch.Tensor)]
    return None


def _has_boundaries(value: Any) -> bool:
    return not (isinstance(value, torch.Tensor) and value.dim() == 1)


def _per_token(value: Any, sizes: list[int]) -> torch.Tensor | None:
    """Return float64 [sum(sizes)] of a value per token or per sequence; None where it is neither."""
    if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == 1 and any(n != 1 for n in sizes):
        value = value[:, 0]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == len(sizes) and len(sizes) != sum(sizes):
        return torch.repeat_interleave(value.cpu().double(), torch.tensor(sizes))
    if isinstance(value, list) and len(value) == len(sizes):
        values: list[Any] = value
        if all(isinstance(each, float) or each.numel() == 1 for each in values):
            return torch.repeat_interleave(
                torch.tensor([float(each) for each in values], dtype=torch.float64), torch.tensor(sizes)
            )
    parts = _sequences(value)
    if parts is None or sum(len(part) for part in parts) != sum(sizes):
        return None
    return torch.cat(parts).double()


def _a_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, Ragged):
        return value.values
    if isinstance(value, list) and value:
        return _a_tensor(value[0])
    return value if isinstance(value, torch.Tensor) else None
