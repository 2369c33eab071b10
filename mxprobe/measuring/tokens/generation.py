"""One batch of sequences while it is generated: their tokens, and the log-probability that the rollout gave to each.

S = sequences sampled from the batch, P = prompt length as padded, V = vocabulary. Everything stays on the device;
nothing is waited for.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import torch

from mxprobe.measuring.compat import caller_frame, frames_from, generation_config
from mxprobe_kernels.policy import TokenStatistics, token_statistics

MAX_SEQUENCES = 32
DENSE_POSITIONS = 32
"""So many first positions of a completion are measured; later on every second, fourth, ...: 16 in each octave."""

_MAX_FRAMES = 64


class Sampling(NamedTuple):
    """How tokens are drawn, as the generation in progress has it."""

    temperature: float
    eos: tuple[int, ...]
    pad: int | None


def is_measured(position: int) -> bool:
    """Say whether a position of a completion, 0 for its first token, is measured."""
    stride = 1 << (position // DENSE_POSITIONS).bit_length()
    return position % stride == 0


def measured_positions(n: int, device: torch.device) -> torch.Tensor:
    """Return int64: those of n positions that `is_measured` is true for, made on the device."""
    parts = [torch.arange(min(n, DENSE_POSITIONS), device=device)]
    start, stride = DENSE_POSITIONS, 2
    while start < n:
        parts.append(torch.arange(start, min(n, 2 * start), stride, device=device))
        start, stride = 2 * start, 2 * stride
    return torch.cat(parts)


def sampling_in_progress() -> Sampling | str:
    """Return what the transformers `generate` running in this thread draws by, or why it is not known.

    Read from its frame: the object that a trainer hands to `generate` is stored on no module.
    """
    for frame in islice(frames_from(caller_frame()), _MAX_FRAMES):
        is_generating, config = generation_config(frame)
        if is_generating:
            return _read(config)
    return "generation is not by transformers' generate(), so its temperature is not known"


def _read(config: Any) -> Sampling | str:
    if getattr(config, "num_beams", 1) not in (None, 1):
        return "beam search reorders the sequences while it generates"
    sampled = bool(getattr(config, "do_sample", False))
    temperature = getattr(config, "temperature", None) if sampled else None
    eos = getattr(config, "eos_token_id", None)
    ends = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),)
    pad = getattr(config, "pad_token_id", None)
    return Sampling(
        1.0 if temperature is None else float(temperature), ends, pad if pad is not None else ends[0] if ends else None
    )


class Generation:
    """`take_logits` with the lm_head's output, `take_tokens` with the embedding's next input; in turn."""

    def __init__(self, ids: torch.Tensor, sampling: Sampling, *, seed: int) -> None:
        """Begin with the ids int64 [B, P] of the prefill."""
        generator = torch.Generator(device=ids.device)
        generator.manual_seed(seed)
        chosen = torch.randperm(len(ids), generator=generator, device=ids.device)[:MAX_SEQUENCES]
        self.index = chosen.sort().values
        self.n_batch = len(ids)
        self.sampling = sampling
        self.prompt = ids.index_select(0, self.index)
        """[S, P]"""
        self.tokens: list[torch.Tensor] = []
        """[S] each"""
        self.statistics: list[TokenStatistics] = []
        """Statistics of the tokens at the measured positions."""
        self.dtype: torch.dtype | None = None
        """dtype of the lm_head's output."""
        self.n_missed = 0
        """Measured positions whose logits were not seen."""
        self.unaltered: torch.Tensor | None = None
        """bool []: the model returned the lm_head's output as its logits."""
        self._logits: torch.Tensor | None = None

    def take_logits(self, logits: torch.Tensor) -> None:
        """Take logits [B, n, V]; the last position's are those of the next token."""
        if len(logits) == self.n_batch and is_measured(len(self.tokens)):
            self.dtype = logits.dtype
            self._logits = logits.detach()[:, -1].index_select(0, self.index).float()

    def compare_logits(self, returned: torch.Tensor) -> None:
        """Hold what the model returned in the prefill against what the lm_head gave it."""
        if self._logits is not None and self.unaltered is None and len(returned) == self.n_batch:
            same = returned.detach()[:, -1].index_select(0, self.index).float() == self._logits
            self.unaltered = same.all()

    def take_tokens(self, ids: torch.Tensor) -> None:
        """Take int64 [B, 1], what was drawn from the last logits."""
        if len(ids) != self.n_batch:
            return
        tokens = ids.detach()[:, 0].index_select(0, self.index)
        if self._logits is None:
            self.n_missed += is_measured(len(self.tokens))
        else:
            self.statistics.append(token_statistics(self._logits, tokens, self.sampling.temperature))
        self.tokens.append(tokens)
        self._logits = None

    @property
    def is_whole(self) -> bool:
        return bool(self.statistics) and not self.n_missed

    def lengths(self) -> torch.Tensor:
        """Return int64 [S]: tokens of each completion, the first end-of-sequence included."""
        tokens = torch.stack(self.tokens, 1)
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        for eos in self.sampling.eos:
            ended |= tokens == eos
        before_end = ended.cumsum(1) - ended.long() == 0
        return before_end.sum(1)
