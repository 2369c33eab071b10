"""`mxprobe set`: the recipe of a live run changes at a boundary between optimizer steps, by its user's command.

The one thing of the agent that changes the training. What is prepared beforehand in our own thread (the recipe read,
the emulation's code loaded, its step hook put in), so that nothing is read or registered at the boundary:

    asked  ->  prepared (our thread)  ->  switched at a boundary (training thread)  ->  told

An emulation outlives the attach. The models' own emulations are used where there are any, whoever made them.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.part import Part
from mxprobe.agent.stepping import between_steps
from mxprobe.events import Event, Tell
from mxprobe.measuring.adapters.weight_modules import has_fused_path
from mxprobe.measuring.compat import is_compiled

Answer = dict[str, Any]
_HOOK_PATIENCE_S = 10.0


class Request(NamedTuple):
    id: int
    line: str
    at_step: int
    """Completed optimizer steps at which to switch; 0: at the next boundary."""


class Recipes(Part):
    """The recipes that the run is emulated under: what they are, and their change at the user's command."""

    name = "recipes"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._switch = RecipeSwitch(self._answer, context.events.tell)

    def watch(self, roots: Sequence[nn.Module]) -> None:
        self._switch.look(list(roots))

    def ask(self, frame: Mapping[str, Any]) -> None:
        if frame["verb"] == "set":
            run, at_step = self._context.run, frame.get("at_step")
            request = Request(frame.get("id", 0), str(frame.get("recipe")), at_step if isinstance(at_step, int) else 0)
            self._switch.ask(request, step=self._n_completed, is_trainer=run.is_trainer)

    def boundary(self) -> None:
        if self._context.run.is_trainer:
            self._switch.at_boundary(self._context.run.roots(), self._n_completed)

    def remove(self) -> None:
        self._switch.leave(self._context.run.why_left)

    def close(self) -> None:
        self._switch.close()

    def status(self) -> dict[str, Any]:
        return {"recipes": self._switch.recipes}

    @property
    def _n_completed(self) -> int:
        """Optimizer steps of the run, those before attach included."""
        return self._context.recorder.step_base + self._context.run.n_steps

    def _answer(self, answer: Answer) -> None:
        def tell() -> None:
            self._context.recorder.flush()
            self._context.transport.control({"verb": "set", **answer})

        self._context.worker.put(tell)


class RecipeSwitch:
    """One request at a time. `answer` sends a frame's members, `tell` takes events."""

    def __init__(self, answer: Callable[[Answer], None], tell: Tell) -> None:
        self._answer = answer
        self._tell = tell
        self._lock = threading.Lock()
        self._pending: Request | None = None
        self._ready = False
        self._is_closed = False
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """id of an emulation -> it, and the recipe last told of it."""

    def ask(self, request: Request, *, step: int, is_trainer: bool) -> None:
        """In the agent's thread. Answers at once where the request is refused."""
        if self._is_closed:  # it came while the last rows were acknowledged
            self._refuse(request, "left", "the probe is leaving")
            return
        with self._lock:
            waiting = self._pending
            if waiting is None:
                self._pending = request
        if waiting is not None:
            self._refuse(request, "busy", f"{waiting.line!r} still waits for its step")
            return
        refusal = _obstacle(request, step, is_trainer) or _prepare(request.line)
        if refusal is not None:
            self._pending = None
            self._refuse(request, *refusal)
            return
        self._ready = True

    def at_boundary(self, roots: list[nn.Module], step: int) -> None:
        """In the training thread, between optimizer steps, `step` of them completed."""
        request = self._pending
        if request is not None and self._ready and step >= request.at_step:
            self._ready, self._pending = False, None
            try:
                models = _switch(roots, request.line)
            except Exception as error:
                self._refuse(request, error.slug if isinstance(error, ObstacleError) else "failed", str(error))
            else:
                self.look(roots)
                self._answer({"id": request.id, "ok": True, "step": step, "models": models})
        self._note(_active())

    def look(self, roots: list[nn.Module]) -> None:
        """Find the emulations that modules of the roots are under; what is new becomes an event."""
        self._note(emulations_of(roots))

    @property
    def recipes(self) -> list[str]:
        """What the process is emulated under, as far as is known."""
        known = [emulation for reference, _ in list(self._known.values()) if (emulation := reference()) is not None]
        return [_summary(emulation) for emulation in known if emulation.is_on]

    def _note(self, emulations: list[Any]) -> None:
        known = [emulation for reference, _ in self._known.values() if (emulation := reference()) is not None]
        for emulation in {id(e): e for e in (*known, *emulations)}.values():
            recipe = emulation.recipe
            if self._known.get(id(emulation), (None, None))[1] is not recipe:
                self._known[id(emulation)] = (weakref.ref(emulation), recipe)
                state = "on" if emulation.is_on else "off"
                self._tell(Event("emulation", str(recipe), state, text=_summary(emulation)))

    def leave(self, why: str) -> None:
        """The hooks come out: a request that waits is not going to be met."""
        with self._lock:
            request, self._pending = self._pending, None
        if request is not None:
            self._refuse(request, "left", f"the probe left first: {why}")

    def close(self) -> None:
        """In the agent's thread. The step hook stays where something is emulated."""
        self._is_closed = True
        api = sys.modules.get("mxprobe.emulation.api")
        if api is not None and between_steps(_HOOK_PATIENCE_S):
            api.stop_counting()

    def _refuse(self, request: Request, reason: str, detail: str) -> None:
        self._answer({"id": request.id, "ok": False, "reason": reason, "detail": detail})


class ObstacleError(Exception):
    def __init__(self, slug: str, detail: str) -> None:
        self.slug = slug
        super().__init__(detail)


def emulations_of(roots: list[nn.Module]) -> list[Any]:
    """The emulations that modules of the roots are under, each once, of whichever copy of our code."""
    found = (m.__dict__.get("_mxprobe_emulation") for root in roots for m in root.modules())
    return list({id(e): e for e in found if e is not None}.values())


def _active() -> list[Any]:
    """Those that this process's own copy of our code knows of, without a walk over the modules."""
    active = getattr(sys.modules.get("mxprobe.emulation.api"), "active", None)  # the module may be half imported
    return active() if active is not None else []


def _obstacle(request: Request, step: int, is_trainer: bool) -> tuple[str, str] | None:
    if not is_trainer:
        return "no_steps", "it runs a model without an optimizer: there is no step boundary to switch at"
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size not in ("", "1") and not request.at_step:
        return "ranks", f"it is rank {os.environ.get('RANK', 'unknown')} of {world_size}"
    if request.at_step and request.at_step <= step:
        return "late", f"it has completed step {step} already"
    return None


def _prepare(line: str) -> tuple[str, str] | None:
    """Load the emulation and put its step hook in; the reason why not."""
    try:
        from mxprobe.emulation.api import count_steps
        from mxprobe.emulation.recipe import Recipe

        Recipe.parse(line)
        if not between_steps(_HOOK_PATIENCE_S):
            return "busy", "its optimizer steps never pause"
        count_steps()
    except Exception as error:
        return "unreadable", str(error) or type(error).__name__
    return None


def _switch(roots: list[nn.Module], line: str) -> list[dict[str, str]]:
    """Each model under the recipe, emulated now where it was not. `ObstacleError` where none of them can be."""
    from mxprobe.emulation.api import emulate
    from mxprobe.emulation.automatic import unwrapped

    models: list[dict[str, str]] = []
    for root in roots:
        emulations = emulations_of([root])
        model = emulations[0].model if emulations else unwrapped(root)
        was = "; ".join(str(emulation.recipe) for emulation in emulations)
        row = {"model": type(model).__name__, "was": was, "now": "", "reason": "", "detail": ""}
        try:
            if not emulations:
                _hold_back(root)
                emulations = [emulate(model, line)]
            else:
                for emulation in emulations:
                    emulation.set(line, now=True)
            row["now"] = "; ".join(_summary(emulation) for emulation in emulations)
        except ObstacleError as obstacle:
            row["reason"], row["detail"] = obstacle.slug, str(obstacle)
        except Exception as error:
            row["reason"], row["detail"] = "no_fit", str(error)
        models.append(row)
    if not any(row["now"] for row in models):
        raise (
            ObstacleError(models[0]["reason"], models[0]["detail"])
            if models
            else ObstacleError("no_fit", "its model is gone")
        )
    return models


def _hold_back(root: nn.Module) -> None:
    """Raise `ObstacleError` for a model with parts that a change of its Linears' forwards would not reach."""
    for name, module in root.named_modules():
        what = name or type(module).__name__
        if is_compiled(module):
            raise ObstacleError("compiled", f"{what} runs inside torch.compile and is not emulated yet")
        if has_fused_path(module):
            raise ObstacleError("fused", f"{what} multiplies in a fused kernel, not in its Linears")


def _summary(emulation: Any) -> str:
    return f"{emulation.recipe} · {len(emulation.touched)} modules emulated, {len(emulation.skipped)} left out"
