"""The one place that decides which implementation of an operation runs.

A kernel lists its implementations in order of preference, each with the reason why it cannot run here (None: it can).
`force` fixes the choice for a block of code; a forced implementation that cannot run is an error that says why.
`record` tells afterwards what ran.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from bestiary.kernels.errors import UnsupportedDispatch

_forced: dict[str, str] = {}
_logs: list[list[tuple[str, str]]] = []


def choose(operation: str, obstacles: Mapping[str, str | None]) -> str:
    """Name of the implementation of `operation` to run.

    Args:
        obstacles: implementation → why it cannot run, in order of preference; None means that it can.
    Raises:
        UnsupportedDispatch: the forced implementation is unknown or cannot run.
    """
    chosen = _choice(operation, obstacles)
    # A compiled graph made its choices when it was traced; appending there would guard on the length of the log.
    if not torch.compiler.is_compiling():
        for log in _logs:
            log.append((operation, chosen))
    return chosen


def _choice(operation: str, obstacles: Mapping[str, str | None]) -> str:
    forced = _forced.get(operation)
    if forced is not None:
        if forced not in obstacles:
            raise UnsupportedDispatch(
                f"{operation} = {forced!r} is not an implementation of it.", remedy=f"one of {', '.join(obstacles)}"
            )
        obstacle = obstacles[forced]
        if obstacle is not None:
            raise UnsupportedDispatch(
                f"{operation} = {forced!r} cannot run: {obstacle}.",
                remedy="drop the forced choice, or change the input",
            )
        return forced
    return next(name for name, obstacle in obstacles.items() if obstacle is None)


@contextmanager
def force(**implementations: str) -> Iterator[None]:
    """Run `operation=implementation` pairs inside the block, e.g. `force(attention="eager", experts="loop")`."""
    before = dict(_forced)
    _forced.update(implementations)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def record() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that grows by (operation, implementation) with every choice made inside the block, in order.

    Recomputation in a backward pass chooses again and is listed again. Compiled code is not listed.
    """
    log: list[tuple[str, str]] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]
