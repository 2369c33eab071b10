"""Training metrics, from the sink that transformers and TRL already log to: `transformers.Trainer.log`.

The class is patched once, only if transformers is imported already; nothing is imported for it.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any, Callable

SOURCE = "transformers.Trainer.log"

Emit = Callable[[dict[str, Any]], None]


class TrainerLog:
    """Wraps and unwraps `Trainer.log`. `emit` gets rows of table `signals` with `metric` left empty."""

    def __init__(self, emit: Emit, on_error: Callable[[str, BaseException], None]) -> None:
        self._emit = emit
        self._on_error = on_error
        self._trainer_class: type | None = None
        self._original: Any = None
        self._wrapper: Any = None
        self._depth = threading.local()
        self._active = False

    def ensure_wrapped(self) -> None:
        """Wrap if the class exists by now; cheap enough for every step."""
        if self._trainer_class is not None:
            return
        module = sys.modules.get("transformers.trainer")
        trainer_class = vars(module).get("Trainer") if module is not None else None
        if isinstance(trainer_class, type) and "log" in vars(trainer_class):
            self._wrap(trainer_class)

    def _wrap(self, trainer_class: type) -> None:
        original = vars(trainer_class)["log"]

        @functools.wraps(original)
        def log(trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return original(trainer, logs, *args, **kwargs)
            depth = getattr(self._depth, "value", 0)
            self._depth.value = depth + 1
            try:
                if depth == 0:
                    self._record(trainer, logs)
                return original(trainer, logs, *args, **kwargs)
            finally:
                self._depth.value = depth

        self._trainer_class, self._original, self._wrapper = trainer_class, original, log
        self._active = True
        trainer_class.log = log  # pyright: ignore[reportAttributeAccessIssue]

    def unwrap(self) -> None:
        """Put the original back; where somebody has wrapped ours since, ours turns into a plain call."""
        self._active = False
        trainer_class, self._trainer_class = self._trainer_class, None
        if trainer_class is not None and vars(trainer_class).get("log") is self._wrapper:
            trainer_class.log = self._original  # pyright: ignore[reportAttributeAccessIssue]

    def _record(self, trainer: Any, logs: Any) -> None:
        try:
            if not trainer.state.is_world_process_zero:
                return
            step, now = int(trainer.state.global_step), time.time_ns()
            framework = framework_of(type(trainer))
            for key, value in dict(logs).items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._emit(
                        {
                            "step": step,
                            "time_ns": now,
                            "source": SOURCE,
                            "framework": framework,
                            "raw_key": str(key),
                            "metric": "",
                            "estimator": "",
                            "value": float(value),
                        }
                    )
        except Exception as error:
            self._on_error("Trainer.log", error)


def framework_of(trainer_class: type) -> str:
    """`trl` where a class of the trainer's ancestry lives there, else `transformers`."""
    return "trl" if any(c.__module__.split(".")[0] == "trl" for c in trainer_class.__mro__) else "transformers"
