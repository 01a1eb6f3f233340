"""The messages of all errors, as the source writes them: where the package raises one, with what and which remedy.

Parts that depend on the case stand as ‹…›, so a message on a terminal is found by the words between them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bestiary.tools.error_page import called, error_classes, sources

GAP = "‹…›"
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")


@dataclass(frozen=True)
class Message:
    """One place that makes an error: its class, what it says, the remedy ("": it comes from elsewhere), the file."""

    error: str
    what: str
    remedy: str
    file: str


def messages(root: Path) -> list[Message]:
    """Of every error class below a checkout, class by class in the alphabet's order."""
    known = {one.name for one in error_classes(root)}
    found = [message for path in sources(root) for message in _of_file(path, root, known)]
    return sorted(set(found), key=lambda one: (one.error, one.file, one.what))


def _of_file(path: Path, root: Path, known: set[str]) -> Iterator[Message]:
    text = path.read_text(encoding="utf-8")
    if not any(f"{name}(" in text for name in known):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = called(node)
        what = _text(node.args[0]) if name in known else ""
        if not re.search(r"\w", what.replace(GAP, "")):
            continue
        remedy = next((_text(keyword.value) for keyword in node.keywords if keyword.arg == "remedy"), "")
        yield Message(name, what, remedy if remedy != GAP else "", path.relative_to(root).as_posix())


def _text(node: ast.expr) -> str:
    """A string of the source with its variable parts as gaps."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return GAP


def table(found: Sequence[Message]) -> str:
    """Markdown: a heading for each class, a row for each message."""
    lines: list[str] = []
    error = None
    for one in found:
        if one.error != error:
            error = one.error
            lines += ["", f"### {error}", "", "| it says | do this |", "|---|---|"]
        lines.append(f"| {_cell(one.what)} | {_cell(one.remedy) or 'as the message says'} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """On one line; what stands between two backticks stays code."""
    flat = " ".join(text.split())
    parts = flat.split("`")
    if len(parts) % 2 == 0:
        return _SPECIAL.sub(r"\\\1", flat)
    return "`".join(part.replace("|", "\\|") if n % 2 else _SPECIAL.sub(r"\\\1", part) for n, part in enumerate(parts))
