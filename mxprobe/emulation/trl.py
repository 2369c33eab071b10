"""AQN as a callback of the HuggingFace Trainer, and so of every TRL trainer. transformers is imported on use."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mxprobe.emulation.api import active
from mxprobe.emulation.aqn import NoiseSchedule, QuantizationNoise, Target
from mxprobe.emulation.recipe import Recipe
from mxprobe_kernels.recipe_grammar import CorrectionKind

if TYPE_CHECKING:
    from transformers import TrainerCallback

_LOG = logging.getLogger("mxprobe.aqn")


def noise_callback(
    schedule: NoiseSchedule | None = None, *, target: Target = "rmsnorm", seed: int = 0
) -> TrainerCallback:
    """Put noise around every `generate` of the trained model, by training progress; none in evaluation.

        trainer = GRPOTrainer(..., callbacks=[mxprobe.emulation.noise_callback()])

    Adds `aqn_sigma` to the trainer's log. Generation in another process (vLLM) is not reached: put
    `QuantizationNoise.rollout` around the weight synchronisation there. Raises ImportError without transformers,
    and, when training starts, UsageError for a model that has no weight to put noise on.
    """
    from transformers import TrainerCallback

    class NoiseCallback(TrainerCallback):
        def __init__(self) -> None:
            self.noise: QuantizationNoise | None = None
            self._watch = ExitStack()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._watch.close()
            self.noise = QuantizationNoise(kwargs["model"], schedule, target=target, seed=seed)
            self._watch.enter_context(self.noise.watch_generate())
            for emulation in active():
                if scale_is_uncorrected(emulation.recipe):
                    _LOG.warning(
                        "AQN is on while the scale error is not corrected (%s): its source applies it only after "
                        "macro-block scaling; switch on mbs:128 for the MXFP4 operands first",
                        emulation.recipe,
                    )

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.noise is not None:
                self.noise.progress = state.global_step / max(state.max_steps, 1)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if self.noise is not None and logs is not None:
                logs["aqn_sigma"] = self.noise.schedule.sigma(self.noise.progress)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._watch.close()

    return NoiseCallback()


def scale_is_uncorrected(recipe: Recipe) -> bool:
    """Return whether a forward operand is MXFP4 with nothing against its power-of-two scale error."""
    return any(
        operand.format == "mxfp4" and all(c.kind is not CorrectionKind.MACRO_BLOCK_SCALING for c in operand.corrections)
        for operand in (recipe.x_fwd, recipe.w_fwd)
    )
