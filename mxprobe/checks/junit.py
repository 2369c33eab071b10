"""Findings as JUnit XML: one test case per limit and module, so that a CI page names the offenders."""

from collections.abc import Sequence
from xml.etree import ElementTree

from .limits import CheckResult, Finding, Status

_SHOWN = 20


def to_junit(result: CheckResult, name: str) -> str:
    """Return an XML document; `name` (the trace) becomes the suite's. Characters that XML cannot hold become `?`."""
    cases: dict[tuple[str, str], list[Finding]] = {}
    for finding in result.findings:
        cases.setdefault((finding.limit, finding.module), []).append(finding)
    suite = ElementTree.Element("testsuite", name=_clean(f"mxprobe check {name}"), tests=str(len(cases)))
    n_failures = n_errors = 0
    for (limit, module), findings in cases.items():
        case = ElementTree.SubElement(suite, "testcase", classname=f"mxprobe.{limit}", name=_clean(module or "run"))
        bad = [finding for finding in findings if finding.status is not Status.OK]
        if not bad:
            continue
        breached = any(finding.status is Status.BREACHED for finding in bad)
        n_failures, n_errors = n_failures + breached, n_errors + (not breached)
        message = ElementTree.SubElement(case, "failure" if breached else "error", message=_clean(sentence(bad[0])))
        message.text = _clean("\n".join(map(sentence, bad[:_SHOWN])))
    suite.set("failures", str(n_failures))
    suite.set("errors", str(n_errors))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def sentence(finding: Finding) -> str:
    """Return `max_nmse: model.layers.0.mlp.up_proj x_fwd train has 0.031, over 0.02`."""
    if finding.status is Status.NOT_MEASURED or finding.value is None:
        return f"{finding.limit}: not measured: {finding.note}"
    if isinstance(finding.bound, tuple):
        return f"{finding.limit}: the verdict is {finding.value}, not {_either(finding.bound)} ({finding.note})"
    side = "under" if finding.limit.startswith("min_") else "over"
    return f"{finding.limit}: {finding.where} has {finding.value:.4g}, {side} {finding.bound:g}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _clean(text: str) -> str:
    return "".join(
        c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe") else "?" for c in text
    )
