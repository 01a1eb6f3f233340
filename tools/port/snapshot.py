"""The verifier in memory, before and after a port's code is loaded and run: whatever was replaced is named."""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WATCHED = ("bestiary.kernels", "bestiary.models", "bestiary.bridges", "bestiary.verify")
LEFT_OUT = ("bestiary.verify.pytest_plugin", "bestiary.verify.isolated", "bestiary.kernels.aot")


@dataclass(frozen=True)
class Seen:
    """An attribute of a module or class, what it was, and what a change in place would alter."""

    owner: Any
    name: str
    value: Any
    inside: tuple[Any, ...]


def _inside(value: Any) -> tuple[Any, ...]:
    if isinstance(value, types.FunctionType):
        return (value.__code__, value.__defaults__, repr(value.__kwdefaults__))
    return (repr(value),) if isinstance(value, tuple | frozenset | int | float | str | types.MappingProxyType) else ()


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType | type | staticmethod | classmethod | property) or hasattr(
        value, "__wrapped__"
    )


def _attributes(owner: Any, *, constants: bool) -> Iterator[Seen]:
    for name, value in list(vars(owner).items()):
        if name.startswith("__") and name not in ("__init__", "__call__", "__post_init__", "__eq__"):
            continue
        if _is_code(value) or (constants and name.isupper()):
            yield Seen(owner, name, value, _inside(value))


def _modules(left_out: frozenset[str]) -> Iterator[types.ModuleType]:
    for package_name in WATCHED:
        package = importlib.import_module(package_name)
        yield package
        for found in pkgutil.walk_packages(package.__path__, package_name + "."):
            last = found.name.rpartition(".")[2]
            if found.name in (*LEFT_OUT, *left_out) or last.startswith(("triton_", "_")):
                continue
            try:
                yield importlib.import_module(found.name)
            except ImportError:
                continue  # needs an extra that is not installed, so nobody can run it either


def take(left_out: frozenset[str] = frozenset()) -> list[Seen]:
    """Everything watched, as it is now; imports all of it.

    Args:
        left_out: modules that belong to the port.
    """
    seen: list[Seen] = []
    for module in _modules(left_out):
        constants = module.__name__.startswith("bestiary.verify") or module.__name__.startswith("bestiary.bridges")
        for one in _attributes(module, constants=constants):
            seen.append(one)
            if isinstance(one.value, type) and one.value.__module__ == module.__name__:
                seen += _attributes(one.value, constants=constants)
    return seen


def replaced(before: list[Seen]) -> list[str]:
    """Names whose object, code or content is another one now."""
    found = []
    for one in before:
        now = vars(one.owner).get(one.name)
        if now is not one.value or _inside(now) != one.inside:
            owner = one.owner.__name__
            place = owner if isinstance(one.owner, types.ModuleType) else f"{one.owner.__module__}.{owner}"
            found.append(f"{place}.{one.name} was replaced in memory")
    return found
