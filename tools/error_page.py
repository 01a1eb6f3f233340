"""`docs/errors.md`: every error class of the package with its cause and its remedy, read from the classes' docstrings.

A docstring states the cause in its first paragraph and, in one that begins with "Remedy:", what usually helps; the
error itself says more: the field and its value, the file, and the next command.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PORTIONS = ("kernels", "models", "bridges", "verify", "training", "tools")
BASE = "BestiaryError"
PAGE = Path("docs") / "errors.md"
_USAGE = 7
_DERIVES = re.compile(r"^class \w+\(\w", re.MULTILINE)  # files without one are not parsed: that takes seconds
_HEAD = """\
# Errors

Every error of the package says what is wrong (the field or key and its value), where it was read and how to go on. A
command ends with the error's exit code: 1 numbers, 2 keys or shapes, 4 refused as unsupported, 5 inconclusive,
6 tampering, 7 usage or environment. `except bestiary.kernels.errors.BestiaryError` catches all of them; `what`,
`read_from`, `remedy` and `exit_code` are its parts. [Troubleshooting](troubleshooting.md) lists their messages.

<!-- written by `make readme` from the classes' docstrings -->
"""


@dataclass(frozen=True)
class ErrorClass:
    """One error class.

    Attributes:
        name, module: where to import it from.   bases: names of the classes it is one of.
        cause: what is wrong, of the class in general.   remedy: what usually helps; "" where its docstring says none.
        exit_code: of a command that it ends.
    """

    name: str
    module: str
    bases: tuple[str, ...]
    cause: str
    remedy: str
    exit_code: int


def error_classes(root: Path) -> list[ErrorClass]:
    """All subclasses of `BestiaryError` below the folders of a checkout, in the order of the layers.

    Read from the source: nothing is imported, so packages that are not installed hide none.
    """
    found: dict[str, ErrorClass] = {}
    texts = {path: path.read_text(encoding="utf-8") for path in sources(root)}
    trees = {path: ast.parse(text) for path, text in texts.items() if _DERIVES.search(text)}
    nodes = [(path, node) for path, tree in trees.items() for node in _classes(tree)]
    known, codes, before = {BASE}, {BASE: _USAGE}, 0
    while len(known) > before:  # a class may stand in a file before its base
        before = len(known)
        for path, node in nodes:
            bases = tuple(ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases)
            kin = next((base for base in bases if base in known), None)
            module = "bestiary." + ".".join(path.relative_to(root).with_suffix("").parts)
            if kin is None or f"{module}.{node.name}" in found:
                continue
            codes[node.name] = _code(node, codes[kin], _constants(trees[path]))
            cause, remedy = _parts(ast.get_docstring(node) or "")
            found[f"{module}.{node.name}"] = ErrorClass(node.name, module, bases, cause, remedy, codes[node.name])
            known.add(node.name)
    order = {name: index for index, name in enumerate(PORTIONS)}
    return sorted(found.values(), key=lambda one: (order[one.module.split(".")[1]], one.module, one.name))


def called(call: ast.Call) -> str:
    """The last part of the name that is called; "" where it is no name."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def sources(root: Path) -> list[Path]:
    """Python files of the package in a checkout."""
    return sorted(path for portion in PORTIONS for path in (root / portion).rglob("*.py"))


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def _constants(tree: ast.Module) -> dict[str, int]:
    """Integers that a module gives names to."""
    found = {}
    for line in tree.body:
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            target, value = line.targets[0], line.value
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, number in pairs:
                if isinstance(number, ast.Constant) and isinstance(number.value, int):
                    found[ast.unparse(name)] = number.value
    return found


def _code(node: ast.ClassDef, inherited: int, constants: Mapping[str, int]) -> int:
    for line in node.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code":
            text = ast.unparse(line.value)
            return constants[text] if text in constants else int(text)
    return inherited


def _parts(doc: str) -> tuple[str, str]:
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(doc))]
    remedy = next((part for part in paragraphs if part.startswith("Remedy:")), "")
    return paragraphs[0], remedy.removeprefix("Remedy:").strip()


def page(classes: Sequence[ErrorClass]) -> str:
    """The page: one table a layer."""
    lines = [_HEAD]
    for portion in PORTIONS:
        rows = [one for one in classes if one.module.split(".")[1] == portion]
        if not rows:
            continue
        lines += [f"## {portion}", "", "| error | cause | remedy | exit |", "|---|---|---|---|"]
        lines += [
            f"| `{one.name}`<br>`{one.module}` | {_cell(one.cause)} | {_cell(one.remedy)} | {one.exit_code} |"
            for one in rows
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    shown = text.replace("|", "\\|")
    return shown[:1].upper() + shown[1:]
