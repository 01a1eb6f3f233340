"""The parsers of `bestiary port new | check | status`, and what they print. Heavy imports wait until one runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[str], None]

ABOUT = "Port a new architecture: lay out the work, judge it, see where it stands."

EXAMPLES = """\
examples:
  bestiary port new llama --plugin ./bestiary-llama       a package of its own
  bestiary port new llama                                 inside a checkout of bestiary
  bestiary port status llama --plugin ./bestiary-llama    open decisions, last verdict, next command
  bestiary port check llama --plugin ./bestiary-llama     the acceptance: fresh process, seed and configs

PORT.md in the new folder is the task. Exit codes are those of verify-bridge; 6: the port breaks its rules."""

NEW = """\
example:
  bestiary port new llama --plugin ./bestiary-llama --json new.json

writes PORT.md (the task), port.json, analysis.json (fields, keys, nearest family), a bridge and a model file in which
each open decision is an error that names it, and verdict.json, the first verdict"""

CHECK = """\
example:
  bestiary port check llama --plugin ./bestiary-llama

writes acceptance.json (the verdict), kills.json (planted bugs) and CARD.md into the port's folder
exit codes: 0 accepted, 6 cheating, else the first of what the levels and the planted bugs found"""

STATUS = """\
examples:
  bestiary port status llama
  bestiary port status llama --plugin ./bestiary-llama --json -"""


def add_port(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `port` and its three commands to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    port = commands.add_parser(
        "port",
        help="port a new architecture",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = port.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = add(actions, "new", "lay out the work: task, skeleton, first verdict", NEW)
    new.add_argument("--config", metavar="FILE", help="a small config.json, where the class cannot be built tiny")
    new.add_argument("--no-sweep", action="store_true", help="do not run the reference to classify config fields")
    check = add(actions, "check", "judge a port: files, all levels afresh, planted bugs", CHECK)
    status = add(actions, "status", "say where a port stands and what is next", STATUS)
    for parser, run in ((new, _new), (check, _check), (status, _status)):
        parser.add_argument("model_type", metavar="MODEL_TYPE", help="Hugging Face's model_type")
        parser.add_argument("--plugin", metavar="DIR", help="the port is a package in this folder; default: in-tree")
        parser.set_defaults(run=run)


def _new(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    from bestiary.bridges.storage import read_json
    from bestiary.tools.port.create import create_in_tree, create_plugin, first_verdict
    from bestiary.tools.port.status import open_decisions
    from bestiary.verify.skeleton import analyse
    from bestiary.verify.skeleton_text import nearest_lines

    raw = read_json(Path(args.config)) if args.config else None
    analysis = analyse(args.model_type, raw=raw, sweep=not args.no_sweep)
    port = create_in_tree(analysis) if args.plugin is None else create_plugin(analysis, Path(args.plugin))
    code = first_verdict(port)
    decisions = open_decisions(port)
    say(f"{port.model_type} against {port.reference}: {len(analysis.fields)} fields, {len(analysis.keys)} key patterns")
    for line in nearest_lines(analysis):
        say(line)
    say(f"{len(decisions)} open decisions; first verdict: exit {code}")
    say(f"the task: {port.folder / 'PORT.md'}")
    return {
        "model_type": port.model_type,
        "folder": str(port.folder),
        "open_decisions": decisions,
        "first_verdict": code,
        "analysis": analysis.as_json(),
    }


def _check(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    from bestiary.tools.port.check import check
    from bestiary.tools.port.state import find
    from bestiary.verify.report import text

    port = find(args.model_type, args.plugin)
    result, self_test = check(port, say=say)
    say(text(result))
    if self_test is not None:
        say(self_test.text())
    code = int(result.exit_code if self_test is None else self_test.exit_code)
    say("accepted" if code == 0 else "not accepted")
    return {
        "exit_code": code,
        "accepted": code == 0,
        "verdict": result.model_dump(mode="json", by_alias=True),
        "problems": [] if self_test is None else self_test.problems,
    }


def _status(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    from bestiary.tools.port.state import find
    from bestiary.tools.port.status import lines, status

    told = status(find(args.model_type, args.plugin))
    for line in lines(told):
        say(line)
    return told
