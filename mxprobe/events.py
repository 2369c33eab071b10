"""Events: what happened in a run. Facts go into columns, for programs; words are made of the facts, for people.

    kind     what it is about: weight_sync, nonfinite, tap, ...
    subject  the module or thing that it is about, "" for the run
    state    what is the case, as a slug
    data     the other facts by name, as JSON

Nothing reads the words. Where a finding quotes them, they are made again from the columns, by `TEMPLATES`.

Standard library only and Python 3.9 syntax: the agent ships this file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

WEIGHT_SYNC, WEIGHT_NOISE, EXPERTS, NONFINITE = "weight_sync", "weight_noise", "experts", "nonfinite"
LOGPROBS, RANK_LOST = "logprobs", "rank_lost"
"""Kinds that more than one module names."""

NORMS = "norms"
"""Subject of `weight_noise` where it is about the weights of all norms."""

_ROLLOUT = "rollout computes with"
_EXPERT = "{subject} expert {expert} {phase}: computes "
_OTHERS = "; the layer's other experts: {layer_recipe}"
_LOW_RANK = "a change of low rank, of relative rms {sigma:.3g}: a merged adapter"
_NOISE = "noise of relative rms {sigma:.3g}"
_OWN = "{subject} {phase}: weights differ from the trainer's own by "
_NORMS = "{subject} {phase}: the weights of {n_changed} of {n_norms} norms differ from the trainer's own by "
_RELAID = {
    "transposed": "the transpose of its weights",
    "read_transposed": "its weights read as if they were stored transposed",
    "stored_transposed": "its weights stored transposed and read as if they were not",
    "halves_exchanged": "the halves of its weights (gate, up) exchanged",
    "rows_interleaved": "its gate and up rows interleaved",
    "rows_as_halves": "its interleaved gate and up rows as halves",
}

TEMPLATES: dict[str, dict[str, str]] = {
    WEIGHT_SYNC: {
        "current": f"{{subject}} current: {_ROLLOUT} the trainer's current weights",
        "behind": f"{{subject}} behind: {_ROLLOUT} the weights of step {{used_step}}, {{lag}} behind; "
        "codes {codes}, the trainer's are {trainer_codes}",
        "behind_first": f"{{subject}} behind: {_ROLLOUT} the weights of step {{used_step}}, {{lag}} behind "
        "(the first version seen since attach); codes {codes}, the trainer's are {trainer_codes}",
        "reordered": f"{{subject}} unknown: {_ROLLOUT} the current weights, their output features in another order",
        "transposed": f"{{subject}} unknown: {_ROLLOUT} the transpose of the current weights",
        "unknown": "{subject} unknown: rollout matches none of the last {n_versions} versions kept, steps {first_step} "
        "to {last_step}, under any known recipe; closest is step {closest_step}. Weights from before attach, of "
        "another model, or in a format that is not known here",
    },
    WEIGHT_NOISE: {
        "noise": _OWN + _NOISE,
        "low_rank": _OWN + _LOW_RANK,
        "norms_noise": _NORMS + _NOISE,
        "own": "{subject} {phase}: the trainer's own weights again",
    },
    EXPERTS: {
        "other_recipe": f"{_EXPERT}with its own weights under {{recipe}}{_OTHERS}",
        "other_expert": f"{_EXPERT}with the weights of expert {{other}}{_OTHERS}",
        **{state: f"{_EXPERT}with {words}{_OTHERS}" for state, words in _RELAID.items()},
        "unknown": f"{_EXPERT}something that none of the known recipes explains "
        f"({{residual_frac:.2g}} of its output's energy){_OTHERS}",
    },
    NONFINITE: {
        "elements": "{subject} {role}: {n} non-finite elements, {n_blocks} blocks left out",
        "experts": "{subject} {role}: non-finite elements in expert {experts}",
    },
    RANK_LOST: {"ended": "{subject}, process {pid}, ended while others went on ({reason})"},
    "attached": {
        "model": "{subject}: {roots}; {n_modules} modules",
        "signals": "{subject}: no model runs here, its signals alone",
        "no_torch": "{subject}: no torch in this process, its signals alone",
    },
    "identity": {"violated": "{subject} {role}: components differ from their total by {gap:.1e} of it"},
    "recipe": {"changed": "{subject} {phase} {recipe}: it was {before} before"},
}
"""Kind -> state -> words, with the names of `data` and `subject` as fields."""


class Event(NamedTuple):
    """One event, as a part of the agent tells of it. Cheap to make: words and JSON are made by `row`."""

    kind: str
    subject: str = ""
    state: str = ""
    data: Mapping[str, Any] = {}
    """Steps, under names that end in `_step`, count from attach like those of all rows."""
    text: str = ""
    """The words, of kinds that `TEMPLATES` does not have; their state where there are none."""

    @property
    def words(self) -> str:
        template = TEMPLATES.get(self.kind, {}).get(self.state)
        return self.text or self.state if template is None else template.format(subject=self.subject, **self.data)

    @property
    def said(self) -> str:
        """The words behind the place: what is the case, without where."""
        template = TEMPLATES[self.kind][self.state].partition(": ")[2]
        return template.format(subject=self.subject, **self.data)

    def at(self, when: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row that a part hands over; `columns` of it are made when it leaves, see `finished`."""
        return {"step": when["step"], "time_ns": when["time_ns"], "event": self}

    def later(self, n_steps: int) -> Event:
        """Return the event with that many steps added to each step of its data."""
        steps = {name: value + n_steps for name, value in self.data.items() if name.endswith("_step")}
        return self._replace(data={**self.data, **steps})

    def columns(self) -> dict[str, Any]:
        """Return the columns of table `events` but for the time."""
        data = json.dumps({name: _finite(value) for name, value in self.data.items()})
        return {"kind": self.kind, "subject": self.subject, "state": self.state, "data": data, "detail": self.words}


Tell = Callable[[Event], None]
"""Whom a part of the agent tells of an event; callable from any thread."""


def finished(row: Mapping[str, Any], step_base: int = 0) -> dict[str, Any]:
    """Return a row as it leaves the process: steps counted from the start of the run, an event as its columns.

    Parts count steps from attach, when the run had taken `step_base`.
    """
    row = dict(row)
    event = row.pop("event", None)
    if event is not None:
        row.update(event.later(step_base).columns())
    return {**row, **{name: row[name] + step_base for name in ("step", "from_step") if name in row}}


def _finite(value: Any) -> Any:
    """JSON has no infinity: such a number becomes text that `float` reads."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
