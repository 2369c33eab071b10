"""Limits of `[check]` against a trace. A limit that cannot be checked fails: a gate must not pass for want of data."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from mxprobe.attribution import recommend
from mxprobe.config import LayerOverride, Settings, Value, keys_of
from mxprobe.errors import TraceError, UsageError
from mxprobe.schema import PLAIN_WORDS
from mxprobe.tables import TABLES
from mxprobe.trace import Trace

from .measures import OPERAND_LIMITS, Measure, OperandMeasures, realised_measures, run_measure

JSON_SCHEMA = "mxprobe.check/1"


class Status(StrEnum):
    OK = "ok"
    BREACHED = "breached"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Finding:
    """One limit held against one number. `value` is a verdict's name for `allow_verdicts`, None if not measured."""

    limit: str
    bound: float | tuple[str, ...]
    status: Status
    value: float | str | None
    module: str = ""
    role: str = ""
    phase: str = ""
    note: str = ""

    @property
    def where(self) -> str:
        return " ".join(part for part in (self.module, self.role, self.phase) if part) or "run"


@dataclass(frozen=True)
class CheckResult:
    """All findings, in the order of the keys. `problems` are those of the trace."""

    findings: tuple[Finding, ...]
    problems: tuple[str, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status is not Status.OK)

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": JSON_SCHEMA,
            "passed": self.passed,
            "n_checked": len(self.findings),
            "n_failed": len(self.failures),
            "problems": list(self.problems),
            "findings": [
                {
                    "limit": each.limit,
                    "bound": list(each.bound) if isinstance(each.bound, tuple) else each.bound,
                    "value": each.value,
                    "status": each.status.value,
                    "module": each.module or None,
                    "role": each.role or None,
                    "phase": each.phase or None,
                    "note": each.note or None,
                }
                for each in self.findings
            ],
        }


def check_trace(trace: Trace, settings: Settings) -> CheckResult:
    """Hold a trace against the limits that are set.

    Raises:
        UsageError: no limit is set, so passing would mean nothing.
        TraceError: the trace is empty, or a table cannot be read.
    """
    limits = settings.section("check")
    roles = limits.pop("roles")
    if not settings.overrides and all(value is None for value in limits.values()):
        raise UsageError(
            "there is nothing to check: no limit is set",
            cause="no mxprobe.toml and no [tool.mxprobe.check] in pyproject.toml from here upwards",
            remedy="write one, e.g. [check] and max_mismatch = 0.01 below it; or pass --set max_mismatch=0.01",
        )
    if all(trace.table(name, (columns[0][0],)).empty for name, columns in TABLES.items()):
        raise TraceError(
            f"{trace.directory} is empty: there is nothing to check",
            cause="it was detached before anything was recorded",
            remedy="check a trace of a run that was probed for a while",
        )
    operands = OperandMeasures(trace, roles if isinstance(roles, tuple) else ())
    findings: list[Finding] = []
    for key in keys_of("check"):
        bound = limits.get(key.name)
        if key.per_module:
            measures = operands.of(key.name) if key.name in OPERAND_LIMITS else realised_measures(trace)
            findings.extend(_judge_modules(key.name, bound, settings.overrides, measures))
        elif isinstance(bound, tuple):
            findings.append(_judge_verdict(key.name, bound, trace, settings))
        elif isinstance(bound, (int, float)):
            findings.append(_judge(key.name, float(bound), run_measure(trace, key.name)))
    return CheckResult(tuple(findings), tuple(trace.problems))


def _judge_modules(
    limit: str, bound: Value, overrides: tuple[LayerOverride, ...], measures: Iterator[Measure]
) -> Iterator[Finding]:
    relevant = [each for each in overrides if limit in each.limits]
    if bound is None and not relevant:
        return
    unmatched = {each.glob: each for each in relevant}
    n_found = 0
    for measure in measures:
        own = float(bound) if isinstance(bound, (int, float)) else None
        for each in relevant:
            if fnmatchcase(measure.module, each.glob):
                own = each.limits[limit]
                unmatched.pop(each.glob, None)
        if own is not None:
            n_found += 1
            yield _judge(limit, own, measure)
    if n_found == 0 and isinstance(bound, (int, float)):
        yield _judge(limit, float(bound), None)
    for glob, each in unmatched.items():
        yield Finding(limit, each.limits[limit], Status.NOT_MEASURED, None, note=f"no measured module matches {glob}")


def _judge(limit: str, bound: float, measure: Measure | None) -> Finding:
    if measure is None:
        return Finding(limit, bound, Status.NOT_MEASURED, None, note="the trace does not hold what this is about")
    holds = measure.value >= bound if limit.startswith("min_") else measure.value <= bound
    status = Status.OK if holds else Status.BREACHED
    return Finding(limit, bound, status, measure.value, measure.module, measure.role, measure.phase)


def _judge_verdict(limit: str, allowed: tuple[str, ...], trace: Trace, settings: Settings) -> Finding:
    found = recommend(trace, settings.thresholds())
    status = Status.OK if found.verdict.value in allowed else Status.BREACHED
    return Finding(limit, allowed, status, found.verdict.value, note=f"{PLAIN_WORDS[found.verdict]}: {found.headline}")
