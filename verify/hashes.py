"""Hashes of everything a verdict rests on, and the comparison of Hugging Face's files with its wheel's RECORD.

A verdict against an edited reference proves nothing: a modelling file that differs from what was installed, or a
function in memory that does not come from its file, is tampering.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import sys
import types
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.metadata import PackagePath, distribution
from pathlib import Path
from typing import Any

PACKAGE = "transformers"
SHARED = ("modeling_utils", "masking_utils", "modeling_rope_utils", "activations", "cache_utils", "integrations.moe")
"""Modules of transformers that every decoder's forward goes through."""


def _sha256(path: Path) -> bytes:
    """sha256 of a file, read again when the file has changed: a self-test asks for the same hundreds of files."""
    state = path.stat()
    return _contents(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=4096)
def _contents(path: Path, *_state: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def digest(paths: Iterable[Path]) -> str:
    """sha256 over names and contents of `paths`, in sorted order."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.name.encode() + b"\0" + _sha256(path))
    return total.hexdigest()


def _python_files(package: types.ModuleType) -> list[Path]:
    return [path for folder in package.__path__ for path in Path(folder).rglob("*.py")]


def own_hashes(bridge_module: str, config_json: str) -> dict[str, str]:
    """Hashes of verifier, gates, bridges, the family's bridge, models, kernels and of the configs that were run."""
    import bestiary.bridges
    import bestiary.kernels
    import bestiary.models
    import bestiary.verify
    from bestiary.verify import gates

    family = sys.modules[bridge_module].__file__
    return {
        "verifier": digest(_python_files(bestiary.verify)),
        "gates": digest([Path(gates.__file__)]),
        "bridges": digest(_python_files(bestiary.bridges)),
        "bridge": digest([Path(family)]) if family else "",
        "models": digest(_python_files(bestiary.models)),
        "kernels": digest(_python_files(bestiary.kernels)),
        "config": hashlib.sha256(config_json.encode()).hexdigest(),
    }


@cache
def _recorded() -> dict[Path, str]:
    """Installed path to base64 sha256 of every Python file in the wheel's RECORD."""
    files: Iterable[PackagePath] = distribution(PACKAGE).files or ()
    found = {}
    for file in files:
        if file.suffix == ".py" and file.hash is not None:
            found[Path(str(file.locate())).resolve()] = file.hash.value
    return found


@cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def loaded_files() -> list[Path]:
    """Source files of the transformers modules that are imported now."""
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]
    files = {vars(sys.modules[name]).get("__file__") for name in names}
    return sorted(_resolved(file) for file in files if isinstance(file, str) and file.endswith(".py"))


def altered_files(recorded: dict[Path, str] | None = None) -> list[str]:
    """Loaded transformers files that differ from the RECORD or are not in it."""
    expected = _recorded() if recorded is None else recorded
    altered = []
    for path in loaded_files():
        value = base64.urlsafe_b64encode(_sha256(path)).rstrip(b"=").decode()
        if expected.get(path) != value:
            altered.append(str(path))
    return altered


@cache
def _defined(file: Path) -> tuple[tuple[str, ...], ...]:
    """Names of the functions and methods that a source file defines: (function,) or (class, method)."""
    found: list[tuple[str, ...]] = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name,))
        elif isinstance(node, ast.ClassDef):
            found += [(node.name, item.name) for item in node.body if isinstance(item, ast.FunctionDef)]
    return tuple(found)


def _function(owner: Any, names: tuple[str, ...]) -> types.FunctionType | None:
    """The plain function behind a name, decorators and descriptors peeled off; None for anything else."""
    value = owner
    for name in names:
        value = vars(value).get(name)
        if value is None:
            return None
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    while value is not None and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def patched_functions(modules: Iterable[str]) -> list[str]:
    """Functions and methods that a transformers module defines and whose code in memory comes from elsewhere.

    Wrappers of transformers itself, torch, huggingface_hub and the standard library are expected.
    """
    homes = [
        Path(vars(sys.modules[name])["__file__"]).parent.resolve() for name in (PACKAGE, "torch", "huggingface_hub")
    ]
    standard = Path(types.__file__).resolve().parent

    @cache
    def expected(file: str) -> bool:
        path = Path(file).resolve()
        inside = path.is_relative_to(standard) and "site-packages" not in path.parts
        return file.startswith("<") or inside or any(path.is_relative_to(home) for home in homes)

    found = []
    for name in modules:
        module = sys.modules[name]
        for names in _defined(Path(vars(module)["__file__"])):
            function = _function(module, names)
            if function is not None and not expected(function.__code__.co_filename):
                found.append(".".join((name, *names)))
    return found


SHARED = ("modeling_utils", "masking_utils", "modeling_rope_utils", "activations", "cache_utils", "integrations.moe")
"""Modules of transformers that every decoder's forward goes through."""


def reference_modules(reference: Any) -> list[str]:
    """The modelling and configuration modules behind a reference class, and those of `SHARED` that are loaded."""
    names = [reference.__module__, reference.config_class.__module__, *(f"{PACKAGE}.{name}" for name in SHARED)]
    return [name for name in names if name in sys.modules]


def reference_hash() -> str:
    """One hash over the transformers files that are loaded."""
    return digest(loaded_files())
