"""The options of `verify-bridge` that say what is written where, and the writing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bestiary.verify import destination
from bestiary.verify.destination import STDOUT, BadDestination

if TYPE_CHECKING:
    from bestiary.verify.self_test import SelfTest
    from bestiary.verify.verdict import Report

HELP: Mapping[str, str] = {
    "json": "write the whole result for a program (- for stdout)",
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


def write_report(args: argparse.Namespace, report: Report) -> bool:
    """Writes the wanted forms of a report; whether one of them went to stdout."""
    return _write(args, {"json": report.to_json})


def write_self_test(args: argparse.Namespace, result: SelfTest) -> bool:
    """Writes the wanted forms of a self-test; whether one of them went to stdout."""
    return _write(args, {"json": result.to_json})
