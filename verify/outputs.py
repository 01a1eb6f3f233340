"""The options of `verify-bridge` that say what is written where, and the writing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bestiary.verify import destination
from bestiary.verify.destination import STDOUT, BadDestination

if TYPE_CHECKING:
    from bestiary.verify.diff import Diff
    from bestiary.verify.self_test import SelfTest
    from bestiary.verify.verdict import Report

HELP: Mapping[str, str] = {
    "json": "write the whole result for a program (- for stdout, here and below)",
    "report": "write one self-contained HTML page",
    "card": "write a Markdown card",
    "junit": "write JUnit XML",
}


def add_options(parser: argparse.ArgumentParser, *kinds: str) -> None:
    """Adds `--KIND FILE` for each of `kinds`, keys of `HELP`."""
    for kind in kinds:
        parser.add_argument(f"--{kind}", metavar="FILE", help=HELP[kind])


def _wanted(args: argparse.Namespace) -> dict[str, str]:
    given = vars(args)
    return {kind: given[kind] for kind in HELP if given.get(kind) is not None}


def check(args: argparse.Namespace) -> None:
    """Complains before a run about files that could not be written after it.

    Raises:
        BadDestination: a folder, a folder that does not exist, or stdout for two documents.
    """
    wanted = _wanted(args)
    for place in wanted.values():
        destination.check(place)
    if list(wanted.values()).count(STDOUT) > 1:
        raise BadDestination("stdout (-) is given to two outputs.", remedy="name a file for all but one")


def _write(args: argparse.Namespace, renderers: Mapping[str, Callable[[], str]]) -> bool:
    """Writes what is wanted; whether stdout holds a document."""
    wanted = _wanted(args)
    for kind, place in wanted.items():
        destination.write_text(place, renderers[kind]())
    return STDOUT in wanted.values()


def write_report(args: argparse.Namespace, report: Report, self_test: SelfTest | None = None) -> bool:
    """Writes the wanted forms of a report; whether one of them went to stdout.

    Args:
        self_test: whose kill matrix page and card show.
    """

    def html() -> str:
        from bestiary.verify.html_report import html_report

        return html_report(report, self_test)

    def markdown() -> str:
        from bestiary.verify.model_card import card

        return card(report, self_test)

    def junit() -> str:
        from bestiary.verify.junit import junit_report

        return junit_report(report)

    return _write(args, {"json": report.to_json, "report": html, "card": markdown, "junit": junit})


def write_self_test(args: argparse.Namespace, result: SelfTest) -> bool:
    """Writes the wanted forms of a self-test; whether one of them went to stdout."""

    def html() -> str:
        from bestiary.verify.html_report import html_self_test

        return html_self_test(result)

    def junit() -> str:
        from bestiary.verify.junit import junit_self_test

        return junit_self_test(result)

    return _write(args, {"json": result.to_json, "report": html, "junit": junit})


def write_diff(args: argparse.Namespace, result: Diff) -> bool:
    """Writes a difference as JSON if wanted; whether it went to stdout."""
    return _write(args, {"json": result.to_json})
