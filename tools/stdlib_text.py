"""Real text that is everywhere: the docstrings of Python's standard library, the same on every machine for one Python.

Sources are parsed, never imported, so nothing runs and platform modules are no obstacle. Order: by module name, then as
they stand in the file. Tests, bundled tools' data and everything installed beside the library are left out.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bestiary.kernels.errors import BestiaryError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "config"}


class NoStandardLibrary(BestiaryError):
    """A Python without the sources of its standard library.

    Remedy: use a Python that was installed with the sources of its library.
    """


@dataclass(frozen=True)
class Docstring:
    """One docstring: `text` as `ast.get_docstring` cleans it.

    `name` is dotted (`json.decoder.JSONDecoder.decode`) and begins with that of the `module` (`json.decoder`).
    """

    name: str
    text: str
    module: str


def docstrings(root: Path | None = None) -> Iterator[Docstring]:
    """Yields every docstring of the library under `root` (default: of the running Python).

    Raises:
        NoStandardLibrary: no Python source there.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [
        (_module_name(path.relative_to(root)), path) for path in root.rglob("*.py") if not _is_left_out(path, root)
    ]
    if not files:
        raise NoStandardLibrary(f"no Python source under {root}.", remedy="install Python with its standard library")
    for name, path in sorted(files):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a template, or a file kept broken on purpose
            continue
        yield from _of(tree, name, name)


def text(characters: int, root: Path | None = None) -> str:
    """At least `characters` characters of docstrings (all there are, if fewer), each whole, an empty line between.

    Args:
        characters: the wanted length; the last docstring is not cut.
        root: the library's folder, default: of the running Python.
    """
    parts, length = [], 0
    for docstring in docstrings(root):
        parts.append(docstring.text)
        length += len(docstring.text) + 2
        if length >= characters:
            break
    return "\n\n".join(parts)


def documents(root: Path | None = None, *, every: int = 10) -> tuple[list[str], list[str]]:
    """One text a module, its docstrings with an empty line between, in two parts that share no package.

    Args:
        root: the library's folder, default: of the running Python.
        every: of the packages and modules at the top, by name, the last of so many is held out with all below it.
    Returns:
        Texts to train on, and those held out.
    Raises:
        NoStandardLibrary.
    """
    modules: dict[str, list[str]] = {}
    for docstring in docstrings(root):
        modules.setdefault(docstring.module, []).append(docstring.text)
    tops = sorted({module.partition(".")[0] for module in modules})
    held_out = set(tops[every - 1 :: every])
    parts: tuple[list[str], list[str]] = [], []
    for module, texts in modules.items():
        parts[module.partition(".")[0] in held_out].append("\n\n".join(texts))
    return parts


def _of(node: ast.AST, name: str, module: str) -> Iterator[Docstring]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        found = ast.get_docstring(node)
        if found and found.strip():
            yield Docstring(name, found, module)
    for child in ast.iter_child_nodes(node):
        inner = (
            f"{name}.{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else name
        )
        yield from _of(child, inner, module)


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _is_left_out(path: Path, root: Path) -> bool:
    folders = path.relative_to(root).parts[:-1]
    return any(part in _LEFT_OUT or part.startswith(("config-", ".")) for part in folders)
