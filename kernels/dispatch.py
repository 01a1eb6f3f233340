"""The one place that decides which implementation of an operation runs.

A kernel lists its implementations in order of preference, each with the reason why it cannot run here (None: it can).
`force` fixes the choice for a block of code; a forced implementation that cannot run is an error that says why.
`as_trained` makes it the same without gradients as with them. `record` tells afterwards what ran. `OPERATIONS` lists
everything that is chosen here, for those who compare all of it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from bestiary.kernels.errors import UnsupportedDispatch


@dataclass(frozen=True)
class Operation:
    """One operation and everything that can run behind it.

    Attributes:
        reference: the implementation that the others are held to: any device and dtype, gradients of any order.
        optimised: implementation → types of the devices that it is written for; on another one it has an obstacle.
    """

    reference: str
    optimised: Mapping[str, tuple[str, ...]]

    def on(self, device: str) -> list[str]:
        """The optimised implementations for a type of device."""
        return [name for name, devices in self.optimised.items() if device in devices]


_CPU, _GPU, _BOTH = ("cpu",), ("cuda",), ("cuda", "cpu")

OPERATIONS: Mapping[str, Operation] = {
    "attention": Operation("eager", {"flex": _BOTH, "documents": _CPU, "sdpa": _BOTH}),
    "norm": Operation("torch", {"triton": _GPU, "lean": _BOTH}),
    "activation": Operation("torch", {"triton": _GPU, "lean": _BOTH}),
    "rope": Operation("torch", {"triton": _GPU}),
    "experts": Operation("loop", {"sorted": _BOTH, "grouped": _BOTH}),
    "expert_rows": Operation("torch", {"triton": _GPU}),
    "linear": Operation("torch", {"onednn": _CPU}),
    "gated_linear": Operation("reference", {"lean": _CPU}),
    "lora_linear": Operation("reference", {"triton": _GPU, "fused": _BOTH}),
    "log_prob": Operation("reference", {"triton": _GPU, "chunked": _BOTH}),
    "selected_log_prob": Operation("reference", {"chunked": _BOTH}),
    "divergence": Operation("reference", {"chunked": _BOTH}),
    "mxfp4": Operation("torch", {"triton": _GPU}),
}
"""Every operation that `choose` is asked about. Level K of the verifier compares each implementation listed here."""


class Log(list[tuple[str, str]]):
    """(operation, implementation) of every choice, in order.

    Attributes:
        free: of every choice, the implementations that nothing kept from running, the preferred first.
        obstacles: (operation, implementation) → what kept it from running; None where nothing did, once at least.
    """

    def __init__(self) -> None:
        super().__init__()
        self.free: list[tuple[str, ...]] = []
        self.obstacles: dict[tuple[str, str], str | None] = {}

    def add(self, operation: str, chosen: str, obstacles: Mapping[str, str | None]) -> None:
        """One choice."""
        self.append((operation, chosen))
        self.free.append(tuple(name for name, obstacle in obstacles.items() if obstacle is None))
        for name, obstacle in obstacles.items():
            if self.obstacles.get((operation, name), "") is not None:
                self.obstacles[operation, name] = obstacle


_forced: dict[str, str] = {}
_logs: list[Log] = []
_as_trained: ContextVar[bool] = ContextVar("bestiary_as_trained", default=False)


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
            log.add(operation, chosen, obstacles)
    return chosen


def forced(operation: str) -> str | None:
    """The implementation that `force` fixes here, if any."""
    return _forced.get(operation)


def _choice(operation: str, obstacles: Mapping[str, str | None]) -> str:
    fixed = forced(operation)
    if fixed is not None:
        if fixed not in obstacles:
            raise UnsupportedDispatch(
                f"{operation} = {fixed!r} is not an implementation of it.", remedy=f"one of {', '.join(obstacles)}"
            )
        obstacle = obstacles[fixed]
        if obstacle is not None:
            raise UnsupportedDispatch(
                f"{operation} = {fixed!r} cannot run: {obstacle}.",
                remedy="drop the forced choice, or change the input",
            )
        return fixed
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
def record() -> Iterator[Log]:
    """Yield a `Log` that grows by (operation, implementation) with every choice made inside the block, in order.

    Recomputation in a backward pass chooses again and is listed again. Compiled code is not listed.
    """
    log = Log()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


@contextmanager
def as_trained() -> Iterator[None]:
    """Inside, a pass without gradients chooses as one with gradients does, so that a reference gives the policy's bits.

    Outside, few tokens without gradients take what is fastest for them, which adds in another order. Not for decoding,
    which would be slower. In this thread (or task) alone.
    """
    before = _as_trained.set(True)
    try:
        yield
    finally:
        _as_trained.reset(before)


def apart_from_training() -> bool:
    """Whether speed alone may decide, because nobody compares the bits with those of a pass with gradients.

    Never while a graph is traced: it would be compiled once for few tokens and once for many.
    """
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and not _as_trained.get()
