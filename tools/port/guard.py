"""What a port may not do, checked on files: change bestiary or transformers, or import what could."""

from __future__ import annotations

import ast
import base64
import hashlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.port.state import GROUP, Port

PORTIONS = ("kernels", "models", "bridges", "verify", "tools")

_STANDARD = ("__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "types", "typing")
_BRIDGES = ("bridge", "errors", "fields", "plan", "rope", "rules", "undecided")
ALLOWED_IMPORTS = frozenset(
    {"bestiary.kernels", "bestiary.models", "einops", "torch", *_STANDARD, *(f"bestiary.bridges.{x}" for x in _BRIDGES)}
)
"""Roots of the modules that a port may import, beside bestiary's own family bridges: nothing that reaches transformers,
files, processes or the verifier."""

# fmt: off
FORBIDDEN_NAMES = frozenset({
    "__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open", "vars", "setattr", "delattr",
    "__builtins__", "__loader__",
})
FORBIDDEN_ATTRIBUTES = frozenset({
    "sys", "os", "importlib", "import_module", "subprocess", "meta_path", "load", "hub", "_C", "__globals__",
    "__code__", "__builtins__",
})
# fmt: on
"""Attribute names by which code reaches other modules (`sys.modules`), their variables, or files (`torch.load`)."""


class Cheating(BestiaryError):
    """A port that changed or reached what it may not; `findings` lists each.

    Remedy: undo what the findings list; only the files that PORT.md names are the port's.
    """

    exit_code = 6

    def __init__(self, findings: list[str]) -> None:
        self.findings = findings
        super().__init__(
            "\n  ".join(["the port breaks its rules:", *findings]),
            remedy="undo it: a port writes its bridge and its model file, and nothing else",
        )


# ------------------------------------------------------------------------------------------------ hashes


def _folder_digest(folders: list[Path], skip: frozenset[str]) -> str:
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.suffix in (".py", ".json", ".css") and name not in skip:
                total.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def fingerprints(skip: str | None = None) -> dict[str, str]:
    """Hash of each portion of bestiary, of the gates alone, and of what transformers' wheel says it holds.

    Args:
        skip: a model_type whose own files inside bestiary do not count.
    """
    import importlib

    own = frozenset({f"{skip}.py", "__init__.py"} if skip else ())
    found = {}
    for name in PORTIONS:
        package = importlib.import_module(f"bestiary.{name}")
        own_here = own if name in ("bridges", "models") else frozenset()
        found[name] = _folder_digest([Path(folder) for folder in package.__path__], own_here)
    gates = importlib.import_module("bestiary.verify.gates")
    found["gates"] = hashlib.sha256(Path(str(gates.__file__)).read_bytes()).hexdigest()
    record = distribution("transformers").read_text("RECORD") or ""
    found["transformers"] = hashlib.sha256(record.encode()).hexdigest()
    return found


def _differs(installed: Distribution, prefix: str) -> Iterator[str]:
    """Python files of a distribution that differ from its RECORD."""
    for file in installed.files or ():
        if file.suffix != ".py" or file.hash is None or not str(file).startswith(prefix):
            continue
        path = Path(str(file.locate()))
        if not path.is_file():
            yield f"{file} is gone from the installed {prefix}"
        elif base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode() != (
            file.hash.value
        ):
            yield f"{file} differs from the RECORD of its wheel"


def _record_findings() -> Iterator[str]:
    """Installed files of transformers' models and of bestiary that are not those of their wheels."""
    yield from _differs(distribution("transformers"), "transformers/")
    try:
        yield from _differs(distribution("bestiary"), "bestiary/")
    except PackageNotFoundError:
        return  # imported from a folder: the hashes of `new` are all there is


# ------------------------------------------------------------------------------------------------ changed paths


def allowed(port: Port, path: str) -> bool:
    """Whether a port inside the checkout may change a path, relative to its root."""
    name = re.escape(port.model_type)
    own = (rf"(bridges|models)/{name}\.py", rf"ports/{name}/.+", rf"tests/.*test_{name}\w*\.py")
    return any(re.fullmatch(one, path) for one in (*own, r"models/__init__\.py", r"pyproject\.toml"))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def changed(root: Path, start: str) -> list[str]:
    """Paths that differ from a commit, and new files that git does not ignore."""
    listed = _git(root, "diff", "--name-only", start) + _git(root, "ls-files", "--others", "--exclude-standard")
    return sorted(set(listed.splitlines()))


def _without_entry(text: str, model_type: str) -> Any:
    document = tomllib.loads(text)
    document.get("project", {}).get("entry-points", {}).get(GROUP, {}).pop(model_type, None)
    return document


def _tree_findings(port: Port, root: Path) -> Iterator[str]:
    paths = changed(root, port.start)
    yield from (f"{path} changed since {port.start[:12]}" for path in paths if not allowed(port, path))
    if "pyproject.toml" in paths:
        before = _without_entry(_git(root, "show", f"{port.start}:pyproject.toml"), port.model_type)
        after = _without_entry((root / "pyproject.toml").read_text(encoding="utf-8"), port.model_type)
        if before != after:
            yield "pyproject.toml changed beyond the entry point of the port"


def _plugin_findings(port: Port) -> Iterator[str]:
    """Files under `src/` other than the package's Python files and its metadata: data to look answers up in."""
    for path in sorted(port.site.rglob("*")):
        inside = path.relative_to(port.site)
        top = inside.parts[0]
        if path.is_dir() or "__pycache__" in inside.parts or top == f"{port.package}.egg-info":
            continue
        if top != port.package or path.suffix != ".py":
            yield f"src/{inside} is no Python file of {port.package}"


# ------------------------------------------------------------------------------------------------ the port's code


@cache
def siblings() -> frozenset[str]:
    """Modules of bestiary's own families, whose rules and readings a port may share.

    What other distributions register does not count, nor an entry that names another module than its family's.
    """
    try:
        points = distribution("bestiary").entry_points.select(group=GROUP)
    except PackageNotFoundError:
        return frozenset()
    return frozenset(point.module for point in points if point.module == f"bestiary.bridges.{point.name}")


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def source_findings(source: str, name: str, package: str) -> Iterator[str]:
    """Imports and names by which a port could reach transformers, files, processes or the verifier.

    Args:
        source: Python text.   name: of the file, for the message.   package: the port's own, which it may import.
    """
    allowed_here = ALLOWED_IMPORTS | siblings() | {package}
    for node in ast.walk(ast.parse(source)):
        for wanted in _imports(node):
            parts = wanted.split(".")
            roots = {".".join(parts[:count]) for count in (1, 2, 3)}
            if not roots & allowed_here or FORBIDDEN_ATTRIBUTES & set(parts):
                yield f"{name}:{node.lineno} imports {wanted}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield f"{name}:{node.lineno} uses {node.id}"
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            yield f"{name}:{node.lineno} uses .{node.attr}"


def file_findings(port: Port) -> list[str]:
    """Everything that can be seen without running the port."""
    found: list[str] = []
    if port.root is None:
        now = fingerprints()
        for part in sorted(now.keys() | port.hashes.keys()):
            if now.get(part) != port.hashes.get(part):
                found.append(f"{part} is not what it was when the port was started (sha256 of its files)")
        found += _plugin_findings(port)
    else:
        found += _tree_findings(port, port.root)
    found += _record_findings()
    for path in port.sources:
        found += source_findings(path.read_text(encoding="utf-8"), path.name, port.package)
    return found
