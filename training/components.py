"""Parts that a run's file names by `module:name`: callbacks, losses, functions over rows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from bestiary.kernels.errors import BestiaryError


def component(path: str, key: str, error: type[BestiaryError]) -> Callable[..., Any]:
    """What `module:name` names.

    Args:
        key: that has it in the run's file.
    Raises:
        error: no such module or name, or nothing that can be called.
    """
    module, colon, name = path.partition(":")
    try:
        found = import_module(module)
    except (ImportError, ValueError) as problem:
        raise error(f"{key} = {path!r}: {problem}.", remedy="module:name of something installed") from problem
    if not colon or not hasattr(found, name):
        raise error(f"{key} = {path!r}: the module {module} has no {name!r}.", remedy="module:name")
    made: Callable[..., Any] = getattr(found, name)
    if not callable(made):
        raise error(f"{key} = {path!r} is no class or function.", remedy="module:name of one")
    return made
