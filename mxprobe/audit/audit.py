"""One trace, or two of the same model, as an audit: its modules by side, and what is found wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from mxprobe.attribution.held_versions import BEHIND, FLIPPED, TURNED, UNKNOWN, HeldVersion, held_versions, held_words
from mxprobe.schema import NOT_COMPARABLE
from mxprobe.trace import Trace

from .module_audit import ModuleAudit, SideAudit, module_audits
from .pitfalls import PITFALLS, Finding
from .searches import find_pitfalls

JSON_SCHEMA = "mxprobe.audit/1"
_HELD = {
    BEHIND: "stale_weights",
    TURNED: "reordered_weights",
    FLIPPED: "flipped_weights",
    UNKNOWN: "unknown_weights",
}
"""State of a held weight -> what is wrong with it."""


@dataclass(frozen=True)
class Audit:
    trainer: str
    """Directory of the trace that the training side was read from."""
    rollout: str
    modules: tuple[ModuleAudit, ...]
    findings: tuple[Finding, ...]

    @property
    def is_clean(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data; numbers that are not finite as null."""
        return {
            "schema": JSON_SCHEMA,
            "trainer": self.trainer,
            "rollout": self.rollout,
            "modules": [
                {
                    "module": m.module,
                    "class_name": m.class_name,
                    "dtype": m.dtype,
                    "status": m.status,
                    "train": _side_json(m.train),
                    "rollout": _side_json(m.rollout),
                    "eval": _side_json(m.evaluation),
                }
                for m in self.modules
            ],
            "findings": [
                {
                    "pitfall": f.pitfall.slug,
                    "title": f.pitfall.title,
                    "symptom": f.pitfall.symptom,
                    "detail": f.detail,
                    "modules": list(f.modules),
                }
                for f in self.findings
            ],
        }


def _side_json(side: SideAudit | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        "quantized": side.quantized,
        "recipe_x": side.recipe_x,
        "recipe_w": side.recipe_w,
        "exact": side.exact,
        "output_error": side.error if side.error == side.error else None,
        "weight_lag": side.weight_lag,
    }


def audit(trainer: Trace, rollout: Trace | None = None) -> Audit:
    """Audit a trace that holds both sides, or a trainer's and a rollout worker's, joined by module name.

    Raises:
        TraceError: a table cannot be read.
    """
    modules, events = module_audits(trainer), trainer.events()
    if rollout is not None:
        other = {m.module: m for m in module_audits(rollout)}
        modules = tuple(
            replace(m, rollout=other[m.module].rollout if m.module in other else None, evaluation=None) for m in modules
        )
        events = pd.concat([events[events["kind"] != "weight_sync"], rollout.events()], ignore_index=True)
    source = trainer if rollout is None else rollout
    findings = find_pitfalls(modules, events) + _find_held(held_versions(trainer, source))
    return Audit(str(trainer.directory), str(source.directory), modules, findings)


def _find_held(held: tuple[HeldVersion, ...]) -> tuple[Finding, ...]:
    """Return what is wrong with the weights that an engine holds; what cannot be compared is no finding."""
    comparable = [each for each in held if each.state != NOT_COMPARABLE]
    found: list[Finding] = []
    for state, slug in _HELD.items():
        named = [each for each in comparable if each.state == state]
        if named and state == BEHIND and len(named) < len(comparable):
            slug = "partial_refit"
        if named:
            modules = tuple(each.module for each in named)
            found.append(Finding(PITFALLS[slug], modules, f"by its codes: {held_words(named)}"))
    return tuple(found)
