"""`bestiary port status`: how far a port is, and the next command."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from bestiary.tools.port.state import ACCEPTANCE, KILLS, VERDICT, Port
from bestiary.verify.hashes import digest
from bestiary.verify.reading import read_report, read_self_test
from bestiary.verify.verdict import Exit, Verdict


def open_decisions(port: Port) -> list[str]:
    """Names of the `undecided(…)` that are left in the port's sources, in their order."""
    found = []
    for path in port.sources:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(call.func, ast.Name) and call.func.id == "undecided" and call.args:
                found.append(ast.literal_eval(call.args[0]))
    return found


def bridge_file(port: Port) -> Path:
    """The port's bridge."""
    if port.root is not None:
        return port.root / "bridges" / f"{port.model_type}.py"
    return port.site / port.package / "bridge.py"


def _verdict(path: Path) -> Verdict | None:
    return read_report(path).verdicts[0] if path.is_file() else None


def _about(verdict: Verdict | None, port: Port) -> dict[str, Any] | None:
    if verdict is None:
        return None
    now = {"port": digest(port.sources), "bridge": digest([bridge_file(port)])}
    name = "port" if "port" in verdict.hashes else "bridge"
    return {
        "verdict": verdict.verdict,
        "exit_code": int(verdict.exit_code),
        "seed": verdict.seed,
        "current": verdict.hashes.get(name) == now[name],
        "levels": {level.id: f"{level.status} {level.passed}/{level.planned}" for level in verdict.levels},
        "error": verdict.error,
        "repro": verdict.repro,
    }


def status(port: Port) -> dict[str, Any]:
    """Open decisions, the last verdict of the loop, the last acceptance verdict, whether it is accepted, what next.

    Raises:
        CorruptVerdict: a damaged verdict file.
    """
    last, acceptance = (_about(_verdict(port.folder / name), port) for name in (VERDICT, ACCEPTANCE))
    kills = port.folder / KILLS
    killed = kills.is_file() and read_self_test(kills).exit_code == Exit.PASS
    accepted = acceptance is not None and acceptance["exit_code"] == 0 and acceptance["current"] and killed
    decisions = open_decisions(port)
    return {
        "model_type": port.model_type,
        "mode": port.mode,
        "reference": port.reference,
        "open_decisions": decisions,
        "last": last,
        "acceptance": acceptance,
        "accepted": accepted,
        "next": _next(port, decisions, last, accepted),
    }


def _next(port: Port, decisions: list[str], last: dict[str, Any] | None, accepted: bool) -> str:
    loop = f"verify-bridge {port.model_type} --json {'verdict.json' if port.root is None else _place(port)}"
    if accepted:
        return "nothing: the port is accepted"
    if decisions or last is None or not last["current"]:
        return loop
    if last["exit_code"]:
        return last["repro"] or loop
    return f"bestiary port check {port.model_type}" + (" --plugin ." if port.root is None else "")


def _place(port: Port) -> str:
    return f"ports/{port.model_type}/{VERDICT}"


def lines(told: dict[str, Any]) -> list[str]:
    """A status as text."""
    shown = [f"{told['model_type']} ({told['mode']}) against {told['reference']}"]
    if told["open_decisions"]:
        shown.append(f"{len(told['open_decisions'])} open decisions: {', '.join(told['open_decisions'])}")
    for name in ("last", "acceptance"):
        about = told[name]
        if about is None:
            shown.append(f"{name}: none yet")
            continue
        age = "" if about["current"] else ", of an older bridge"
        shown.append(f"{name}: {about['verdict']} (exit {about['exit_code']}, seed {about['seed']}{age})")
        shown += [f"  {level} {text}" for level, text in about["levels"].items()]
        shown += [f"  {about['error']}"] if about["error"] else []
    return [*shown, f"accepted: {'yes' if told['accepted'] else 'no'}", f"next: {told['next']}"]
