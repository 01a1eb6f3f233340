"""What waits for a part of torch that is slow to import, and that most programs never need.

torch's compiler and its counter of FLOPs take longer to import than all that `import torch` brings. Whoever needs one
imports it before anything of ours can be asked about it, so that what we have to tell it can wait until then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_waiting: dict[str, list[Callable[[ModuleType], object]]] = {}
_changing = threading.Lock()


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Calls `then` with a module as soon as somebody has imported it, whole; at once if that is so already."""
    with _changing:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        _waiting.setdefault(name, []).append(then)
    if name in sys.modules:
        _tell(name, import_module(name))  # which waits for a thread that is in the middle of it


def _tell(name: str, module: ModuleType) -> None:
    with _changing:
        waited = _waiting.pop(name, [])
    for then in waited:
        then(module)


def uncompiled(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`torch.compiler.disable(reason=…)` as a decorator that does not import the compiler."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        disabled = function

        def disable(_: ModuleType) -> None:
            nonlocal disabled
            disabled = torch.compiler.disable(function, reason=reason)

        when_imported("torch._dynamo", disable)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return disabled(*args, **kwargs)

        return call

    return decorate


def in_eager(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.set_stance("force_eager")` as a decorator that does not import the compiler."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # and so nothing is compiled
            return function(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return call


class _Finder:
    """Adds to the execution of a module what waits for it; finds nothing by itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, from the finders behind this one."""
        if name not in _waiting:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            _tell(name, module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
