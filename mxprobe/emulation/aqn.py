"""Adaptive quantization noise: Gaussian noise on weights, smaller in each stage.

    sigma(0) = 0,  sigma(k) = sigma_start (sigma_end / sigma_start)^((k - 1) / (K - 1))     k = 1 .. K
    w <- w + sigma(k) rms(w) z                                             z ~ N(0, 1), fresh for each rollout

Source: QeRL (noise on RMSNorm weights, 1e-2 to 1e-4 in 10 stages, the first 0) and arXiv 2605.20402 (on weights
before each rollout, 1 % to 0.1 %). It removes no error: it manages exploration, and is judged on entropy and
reward. RMSNorm weights are near one, so that noise relative to their rms is QeRL's absolute noise.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn

from mxprobe.errors import UsageError

Target = Literal["rmsnorm", "weights"]
_LOG = logging.getLogger("mxprobe.aqn")


@dataclass(frozen=True)
class NoiseSchedule:
    """Relative noise by training progress: `stages` equal parts, the first without noise, so K = stages - 1.

    UsageError for fewer than two stages or a sigma that is not positive.
    """

    sigma_start: float = 1e-2
    sigma_end: float = 1e-4
    stages: int = 10

    def __post_init__(self) -> None:
        if self.stages < 2 or self.sigma_start <= 0 or self.sigma_end <= 0:
            raise UsageError(
                f"cannot make a noise schedule of {self.stages} stages from {self.sigma_start} to {self.sigma_end}",
                remedy="use at least two stages (the first has no noise) and positive sigmas",
            )

    def stage(self, progress: float) -> int:
        """Return the stage, 0 .. stages - 1, of a progress in [0, 1]; outside is clamped."""
        return min(max(int(progress * self.stages), 0), self.stages - 1)

    def sigma(self, progress: float) -> float:
        """Return the relative noise at that progress; 0 in the first stage."""
        k = self.stage(progress)
        decay = (self.sigma_end / self.sigma_start) ** ((k - 1) / max(self.stages - 2, 1))
        return self.sigma_start * decay if k else 0.0


class QuantizationNoise:
    """Adds the noise before a rollout and takes it off again, exactly: weights are copied, not subtracted.

        noise = QuantizationNoise(model)
        with noise.rollout(progress=step / total_steps):
            completions = generate(...)

    `watch_generate` does the same around every `generate` of the model while it is in training mode, and nothing
    in evaluation.

    Args:
        target: `rmsnorm`, the weight of every module whose class name contains RMSNorm, noise relative to each
            weight's rms; or `weights`, of every Linear but the head.
        seed: of the private generator; the global one is not touched.

    Raises:
        UsageError: the model has no such weight.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: NoiseSchedule | None = None,
        *,
        target: Target = "rmsnorm",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.schedule = schedule or NoiseSchedule()
        self.target: Target = target
        self._weights = _weights_of(model, target)
        self._seed = seed
        self._n_draws = 0
        self._has_warned = False
        self._saved: list[torch.Tensor] | None = None
        self.sigma = 0.0
        """Relative noise on the weights now; 0 while they are as trained."""
        self.progress = 0.0
        """Share of the training done, in [0, 1]: what `generate` uses under `watch_generate`."""

    @property
    def names(self) -> list[str]:
        """Parameters that receive noise."""
        return list(self._weights)

    @property
    def is_on(self) -> bool:
        return self._saved is not None

    @contextmanager
    def rollout(self, progress: float) -> Generator[float]:
        """Put noise of that progress on the weights inside, and the trained weights back bit for bit. Yields sigma."""
        self.add(progress)
        try:
            yield self.sigma
        finally:
            self.restore()

    @contextmanager
    def watch_generate(self) -> Generator[None]:
        """Let `model.generate` run under noise of `self.progress` while inside, when `model.training` is True."""
        model: Any = self.model
        before = model.__dict__.get("generate")
        original = model.generate
        is_watching = True

        @wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if not (is_watching and model.training):
                return original(*args, **kwargs)
            with self.rollout(self.progress):
                return original(*args, **kwargs)

        model.__dict__["generate"] = generate
        try:
            yield
        finally:
            is_watching = False
            if model.__dict__.get("generate") is generate:
                del model.__dict__["generate"]
                if before is not None:
                    model.__dict__["generate"] = before

    @torch.no_grad()
    def add(self, progress: float) -> float:
        """Put fresh noise on the weights; returns sigma. A second call replaces the noise, never stacks it."""
        self.restore()
        sigma = self.schedule.sigma(progress)
        if sigma == 0.0:
            return 0.0
        if not self.model.training and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "noise of sigma %g goes on a model in evaluation mode: right for a rollout of the training, wrong for "
                "an evaluation, whose numbers would be those of another model",
                sigma,
            )
        self._saved = [parameter.detach().clone() for parameter in self._weights.values()]
        self._n_draws += 1
        for index, parameter in enumerate(self._weights.values()):
            # One generator per draw and parameter: the same noise on every rank, whatever else it trains.
            generator = torch.Generator().manual_seed(hash((self._seed, self._n_draws, index)) % 2**63)
            values = parameter.detach()
            noise = torch.randn(values.shape, generator=generator, dtype=torch.float32).to(values.device)
            rms = values.float().square().mean().sqrt()
            parameter.copy_((values.float() + sigma * rms * noise).to(values.dtype))
        self.sigma = sigma
        return sigma

    @torch.no_grad()
    def restore(self) -> None:
        """Put the trained weights back, bit for bit. Does nothing when there is no noise."""
        if self._saved is None:
            return
        for parameter, saved in zip(self._weights.values(), self._saved, strict=True):
            parameter.copy_(saved)
        self._saved = None
        self.sigma = 0.0


def _weights_of(model: nn.Module, target: Target) -> dict[str, nn.Parameter]:
    """Return each weight once, under its first name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if target == "rmsnorm":
            wanted = "RMSNorm" in type(module).__name__
        else:
            wanted = isinstance(module, nn.Linear) and "lm_head" not in name
        weight = dict(module.named_parameters(recurse=False)).get("weight") if wanted else None
        if weight is not None and id(weight) not in seen:
            seen.add(id(weight))
            found[f"{name}.weight"] = weight
    if not found:
        what = "RMSNorm weight" if target == "rmsnorm" else "Linear weight"
        raise UsageError(
            f"{type(model).__name__} has no {what} to put noise on",
            cause="its normalisation layers have another class name" if target == "rmsnorm" else "",
            remedy="use target='weights'" if target == "rmsnorm" else "use target='rmsnorm'",
        )
    return found
