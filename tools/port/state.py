"""Where a port lies and what `new` recorded of it: the file `port.json` and the paths around it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bestiary.kernels.errors import BestiaryError

SCHEMA = "bestiary.port_state/1"
STATE, TASK, VERDICT, ACCEPTANCE, KILLS, CARD = (
    "port.json",
    "PORT.md",
    "verdict.json",
    "acceptance.json",
    "kills.json",
    "CARD.md",
)
GROUP = "bestiary.bridges"


class NoPort(BestiaryError):
    """A folder without a readable `port.json`.

    Remedy: start one: `bestiary port new MODEL_TYPE --plugin DIR`.
    """


class PortExists(BestiaryError):
    """`new` for a model_type that has a bridge, or into a folder that holds something.

    Remedy: `bestiary port status`, or give another folder.
    """


class NoCheckout(BestiaryError):
    """An in-tree port where bestiary is not a git checkout, or one with uncommitted changes.

    Remedy: commit what is open, or port into a package: `--plugin DIR`.
    """


@dataclass(frozen=True)
class Port:
    """One port.

    Attributes:
        model_type, reference: of the family.
        mode: "plugin": a package of its own; "tree": files inside a checkout of bestiary.
        start: commit from which changes are counted; "" in plugin mode.
        hashes: of what a port may not change, as `guard.fingerprints` computes them.
        folder: where `port.json` lies; not stored.
        root: of the checkout; None in plugin mode; not stored.
    """

    model_type: str
    reference: str
    mode: Literal["plugin", "tree"]
    start: str
    hashes: dict[str, str]
    folder: Path
    root: Path | None = None

    @property
    def package(self) -> str:
        """Import name of a plugin's package."""
        return f"bestiary_{self.model_type}"

    @property
    def site(self) -> Path:
        """Folder that holds the entry point; on PYTHONPATH the port is found without being installed."""
        return self.folder / "src" if self.root is None else self.folder

    @property
    def module(self) -> str:
        """Import path of the bridge."""
        return f"{self.package}.bridge" if self.root is None else f"bestiary.bridges.{self.model_type}"

    @property
    def sources(self) -> list[Path]:
        """Python files that the port consists of."""
        if self.root is None:
            return sorted(self.site.rglob("*.py"))
        return [self.root / part / f"{self.model_type}.py" for part in ("bridges", "models")]

    def environment(self) -> dict[str, str]:
        """Environment of a process that finds the port's entry point."""
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.site), *([inherited] if inherited else [])])
        return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def write(self) -> None:
        """Writes `port.json`."""
        stored = {name: value for name, value in asdict(self).items() if name not in ("folder", "root")}
        text = json.dumps({"schema": SCHEMA, **stored}, indent=1) + "\n"
        (self.folder / STATE).write_text(text, encoding="utf-8")


def python() -> list[str]:
    """The interpreter of this process, as the start of a command."""
    return [sys.executable]


def checkout() -> Path:
    """Root of the checkout that bestiary is imported from.

    Raises:
        NoCheckout: it is an installed package.
    """
    import bestiary.verify

    root = Path(next(iter(bestiary.verify.__path__))).resolve().parent
    if not (root / "pyproject.toml").is_file() or not (root / ".git").exists():
        raise NoCheckout(
            f"bestiary is imported from {root}, which is no git checkout.", remedy="port into a package: --plugin DIR"
        )
    return root


def find(model_type: str | None, plugin: str | None, root: Path | None = None) -> Port:
    """The port of a plugin folder, or of a model_type inside the checkout.

    Raises:
        NoPort: there is none, or its file is damaged.
    """
    if plugin is None and model_type is None:
        raise NoPort("no port is named.", remedy="give MODEL_TYPE, or --plugin DIR")
    base = None if plugin is not None else root or checkout()
    folder = Path(plugin).resolve() if plugin is not None else (base or Path()) / "ports" / str(model_type)
    file = folder / STATE
    remedy = "start one: bestiary port new MODEL_TYPE [--plugin DIR]"
    if not file.is_file():
        raise NoPort(f"{file} is not there.", remedy=remedy)
    try:
        stored: Any = json.loads(file.read_text(encoding="utf-8"))
        if stored.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        port = Port(**stored, folder=folder, root=base)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoPort(f"{file} is damaged: {error}.", remedy=remedy) from error
    if model_type is not None and port.model_type != model_type:
        raise NoPort(f"{file} is the port of {port.model_type}, not of {model_type}.", remedy="name the right one")
    return port
