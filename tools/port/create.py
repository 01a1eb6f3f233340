"""`bestiary port new`: a work folder with the task, the skeleton and the first verdict."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from bestiary.bridges import registered_bridges
from bestiary.tools.port.guard import changed, fingerprints
from bestiary.tools.port.state import GROUP, TASK, VERDICT, NoCheckout, Port, PortExists, checkout, python
from bestiary.tools.port.task import task
from bestiary.verify.skeleton import Analysis
from bestiary.verify.skeleton_text import bridge_source, model_source

ANALYSIS = "analysis.json"
TIMEOUT = 600
FIRST = "V0..V6"  # what can be planned for a bridge that reads no config yet

_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1.0"
description = "{name} for bestiary."
requires-python = ">=3.11"
dependencies = ["bestiary"]

[project.entry-points."bestiary.bridges"]
{model_type} = "{module}:BRIDGE"

[tool.setuptools.packages.find]
where = ["src"]
"""


def create_plugin(analysis: Analysis, folder: Path) -> Port:
    """A package of its own in `folder`, which must be empty or absent.

    Raises:
        PortExists: the folder holds something, or the model_type has a bridge.
    """
    _new(analysis)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PortExists(f"{folder} is not empty.", remedy="give a new folder; bestiary port status shows an old one")
    port = Port(analysis.model_type, analysis.reference, "plugin", "", fingerprints(), folder.resolve())
    package = port.site / port.package
    package.mkdir(parents=True)
    files = {
        folder / "pyproject.toml": _PROJECT.format(
            distribution=_distribution(port), name=analysis.name, model_type=port.model_type, module=port.module
        ),
        folder / ".gitignore": "*.egg-info/\n__pycache__/\n",
        package / "__init__.py": f'"""{analysis.name} for bestiary."""\n',
        package / "bridge.py": bridge_source(analysis, f"{port.package}.model"),
        package / "model.py": model_source(analysis),
    }
    return _finish(port, analysis, files)


def create_in_tree(analysis: Analysis, root: Path | None = None) -> Port:
    """Files inside the checkout of bestiary, and the entry point in its pyproject.toml.

    Args:
        root: of the checkout; None: the one that bestiary is imported from.
    Raises:
        NoCheckout: none, or one with uncommitted changes.   PortExists: the model_type has a bridge.
    """
    _new(analysis)
    root, name = checkout() if root is None else root, analysis.model_type
    start = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    dirty = changed(root, start)
    if dirty:
        raise NoCheckout(
            f"{root} has changes that are not committed, first {dirty[0]}.",
            remedy="commit them: what a port changes is counted from a commit",
        )
    folder = root / "ports" / name
    if folder.exists():
        raise PortExists(f"{folder} is there.", remedy=f"bestiary port status {name}")
    folder.mkdir(parents=True)
    port = Port(name, analysis.reference, "tree", start, fingerprints(name), folder, root)
    project = root / "pyproject.toml"
    files = {
        root / "bridges" / f"{name}.py": bridge_source(analysis, f"bestiary.models.{name}"),
        root / "models" / f"{name}.py": model_source(analysis),
        project: _with_entry(project.read_text(encoding="utf-8"), name, port.module),
    }
    return _finish(port, analysis, files)


def first_verdict(port: Port) -> int:
    """Runs `verify-bridge` on the skeleton; its verdict lies in the port's folder, its exit code is returned."""
    command = [*python(), "-m", "bestiary.verify.cli", port.model_type, "--quiet", "--level", FIRST]
    command += ["--json", str(port.folder / VERDICT)]
    done = subprocess.run(
        command, env=port.environment(), cwd=port.folder, capture_output=True, timeout=TIMEOUT, check=False
    )
    return done.returncode


def _new(analysis: Analysis) -> None:
    if analysis.model_type in registered_bridges():
        raise PortExists(
            f"model_type = {analysis.model_type!r} has a bridge.", remedy=f"verify-bridge {analysis.model_type}"
        )


def _distribution(port: Port) -> str:
    return port.package.replace("_", "-")


def _with_entry(text: str, name: str, module: str) -> str:
    """pyproject.toml with one more line at the end of the table of bridges."""
    head = re.search(rf'^\[project\.entry-points\."{re.escape(GROUP)}"\]\n(?:\S.*\n)*', text, re.MULTILINE)
    if head is None:
        raise NoCheckout(f"pyproject.toml has no table of {GROUP}.", remedy="port into a package: --plugin DIR")
    return f'{text[: head.end()]}{name} = "{module}:BRIDGE"\n{text[head.end() :]}'


def _finish(port: Port, analysis: Analysis, files: dict[Path, str]) -> Port:
    metadata = port.site / f"{port.package}.egg-info"
    metadata.mkdir()
    files |= {
        port.folder / TASK: task(port, analysis),
        port.folder / ANALYSIS: json.dumps(analysis.as_json(), indent=1, ensure_ascii=False) + "\n",
        metadata / "PKG-INFO": f"Metadata-Version: 2.1\nName: {_distribution(port)}\nVersion: 0.1.0\n",
        metadata / "entry_points.txt": f"[{GROUP}]\n{port.model_type} = {port.module}:BRIDGE\n",
    }
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
    port.write()
    return port
