"""Results as JUnit XML, for the page of a CI service: a suite a family, a case a level, a planted bug or a rewrite.

Only what passed is a passed case: a refused or inconclusive level is an error, a level that did not run is skipped
behind the one that kept it from running.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as xml

from bestiary.verify.self_test import FamilyResult, SelfTest
from bestiary.verify.verdict import Exit, Level, Report, Verdict

_NOT_XML = re.compile("[^\t\n -\ud7ff\ue000-�\U00010000-\U0010ffff]")


def _clean(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _case(suite: xml.Element, name: str, seconds: float, problem: tuple[str, str, str] | None = None) -> None:
    """Adds a case; `problem` is its element (failure, error or skipped), its message and its text."""
    family = suite.get("name", "")
    case = xml.SubElement(suite, "testcase", classname=family, name=_clean(name), time=f"{seconds:.3f}")
    if problem is not None:
        kind, message, text = problem
        xml.SubElement(case, kind, message=_clean(message)).text = _clean(text)


def _problem(level: Level) -> tuple[str, str, str] | None:
    if level.status == "ok":
        return None
    kind = {"fail": "failure", "not run": "skipped"}.get(level.status, "error")
    text = "\n".join(f"{item.status} {item.check}: {item.detail}" for item in level.findings)
    return kind, f"{level.status}: {level.passed} of {level.planned} checks passed", text


def _suite(root: xml.Element, name: str, seconds: float) -> xml.Element:
    return xml.SubElement(root, "testsuite", name=_clean(name), time=f"{seconds:.3f}")


def _finish(root: xml.Element) -> str:
    """Counts cases and writes the document."""
    for suite in root:
        kinds = [child.tag for case in suite for child in case]
        counts = {"tests": len(suite), "failures": kinds.count("failure")}
        counts |= {"errors": kinds.count("error"), "skipped": kinds.count("skipped")}
        for name, count in counts.items():
            suite.set(name, str(count))
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode")


def junit_report(report: Report) -> str:
    """The XML of a report; it has a failure or an error exactly where the exit code is not 0."""
    root = xml.Element("testsuites", name="verify-bridge")
    for verdict in report.verdicts:
        suite = _suite(root, verdict.family, verdict.seconds)
        for level in verdict.levels:
            _case(suite, f"{level.id} {level.title}", level.seconds, _problem(level))
        if _unexplained(verdict):
            text = "\n".join(filter(None, [verdict.error, *verdict.weak]))
            _case(suite, "verdict", 0.0, ("error", verdict.verdict, text))
    return _finish(root)


def _unexplained(verdict: Verdict) -> bool:
    """Whether a verdict does not pass although no level says why: tampering, a weak test."""
    said = any(level.status not in ("ok", "not run") for level in verdict.levels)
    return verdict.exit_code != Exit.PASS and not said


def junit_self_test(result: SelfTest) -> str:
    """The XML of a self-test: a case for each planted bug and each benign rewrite of each family."""
    root = xml.Element("testsuites", name="verify-bridge self-test")
    for family in result.families:
        suite = _suite(root, family.family, family.seconds)
        for kill in family.kills:
            survives = ("failure", f"survives {kill.level} ({kill.verdict})", kill.cause)
            _case(suite, f"{kill.level} {kill.bug}", kill.seconds, None if kill.killed else survives)
        for run in family.passes:
            alarm = ("failure", f"false alarm: {run.verdict}", f"{run.check} {run.detail}")
            _case(suite, f"benign {run.rewrite}", run.seconds, None if run.passed else alarm)
    problems = _others(result.problems, result.families)
    if problems or (result.exit_code != Exit.PASS and not result.problems):
        suite = _suite(root, "self-test", 0.0)
        _case(suite, "result", 0.0, ("error", f"exit {int(result.exit_code)}", "\n".join(problems)))
    return _finish(root)


def _others(problems: Sequence[str], families: Sequence[FamilyResult]) -> list[str]:
    """Problems that are no survivor and no false alarm, which have cases of their own."""
    known = [f"{family.family}: {kill.bug} survives" for family in families for kill in family.survivors]
    known += [f"{family.family}: false alarm on {run.rewrite}" for family in families for run in family.alarms]
    return [problem for problem in problems if not any(problem.startswith(one) for one in known)]
