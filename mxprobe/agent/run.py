"""The run that is watched: what it is, its model and its optimizer. Neither is kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum

from torch import nn
from torch.optim import Optimizer

from mxprobe.agent.part import METRICS, ROLLOUT, TRAINER
from mxprobe.measuring.adapters.main_parameters import is_stepped_by

FOREIGN_STEPS = 4
"""Steps of another optimizer of the model, without one of ours, after which that one marks the boundaries. Of one of
another model, after the death of ours: the model is gone."""


class State(Enum):
    """Where a session stands: see `mxprobe.agent.session`."""

    OBSERVING = "observing"
    SERVING = "serving"
    ATTACHED = "attached"
    GONE = "gone"


class Run:
    """Written by the training thread at a step boundary; read by any."""

    def __init__(self) -> None:
        self.role = TRAINER
        self.n_steps = 0
        """Optimizer steps since attach that are over; for a process that serves, forward passes."""
        self.n_probed = 0
        self.why_left = ""
        """Set as soon as the hooks come out."""
        self.root_names: list[str] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._foreign: dict[int, int] = {}

    @property
    def is_trainer(self) -> bool:
        return self.role == TRAINER

    @property
    def runs_no_model(self) -> bool:
        return self.role == METRICS

    def train(self, roots: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """The process takes steps of this optimizer on these roots."""
        self.role = TRAINER
        self._optimizer = weakref.ref(optimizer)
        self._hold(roots)

    def serve(self, root: nn.Module) -> None:
        """The process runs this root forward, and trains nothing."""
        self.role = ROLLOUT
        self._hold([root])

    def _hold(self, roots: Sequence[nn.Module]) -> None:
        self.root_names = [type(root).__name__ for root in roots]
        self._roots = [weakref.ref(root) for root in roots]

    def roots(self) -> list[nn.Module]:
        """Return those that are still alive."""
        return [root for reference in self._roots if (root := reference()) is not None]

    @property
    def optimizer(self) -> Optimizer | None:
        return self._optimizer() if self._optimizer is not None else None

    @property
    def is_gone(self) -> bool:
        """The process has dropped model and optimizer, to build others; what we hold of them keeps memory from it."""
        return self.optimizer is None and not self.roots()

    def ends_step(self, optimizer: Optimizer) -> bool | None:
        """Whether this optimizer's step ends a step of the run; another of the model's may take over the part.

        None where optimizers of other models step on and on while ours is dead: the model is gone.
        """
        ours = self.optimizer
        if optimizer is ours:
            self._foreign.clear()
            return True
        n = self._foreign[id(optimizer)] = self._foreign.get(id(optimizer), 0) + 1
        if ours is not None and n < FOREIGN_STEPS:
            return False
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(is_stepped_by(p, owned) for root in self.roots() for p in root.parameters()):
            return None if ours is None and n >= FOREIGN_STEPS else False
        self._optimizer = weakref.ref(optimizer)
        self._foreign.clear()
        return True
