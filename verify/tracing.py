"""What every module of a model saw and gave in one forward, in the order of execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def floating(value: Any) -> Iterator[Tensor]:
    """Every floating tensor inside nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from floating(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from floating(item)


@dataclass(frozen=True)
class Event:
    """One side of one call: `side` is "in" or "out", `tensors` its floating tensors in order."""

    module: str
    side: str
    tensors: tuple[Tensor, ...]


@dataclass
class Trace:
    """The events of one forward in order."""

    events: list[Event] = field(default_factory=list)

    def first(self, module: str, side: str) -> tuple[Tensor, ...] | None:
        """Tensors of the first such event of `module`, or None if it did not run."""
        for event in self.events:
            if event.module == module and event.side == side:
                return event.tensors
        return None

    def modules(self) -> list[str]:
        """Names of the modules that ran, in order of their first output."""
        return list(dict.fromkeys(event.module for event in self.events if event.side == "out"))


def unfused(trace: Trace, parts: Mapping[str, tuple[str, int, int]]) -> Trace:
    """`trace` and, for each module in `parts`, what passed through its columns of a fused one's output.

    Args:
        parts: a module's name to the fused module, its first column and their end.
    """
    inside: dict[str, list[tuple[str, int, int]]] = {}
    for name, (fused, start, stop) in parts.items():
        inside.setdefault(fused, []).append((name, start, stop))
    cut = [
        Event(name, one.side, tuple(x[..., start:stop] if one.side == "out" else x for x in one.tensors))
        for one in trace.events
        for name, start, stop in inside.get(one.module, ())
    ]
    return Trace([*trace.events, *cut])


def _copies(value: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().to("cpu", copy=True) for tensor in floating(_in_order(value)))


def _in_order(value: Any) -> Any:
    """A router's answer (logits, weights, experts) with the chosen experts in the order of their numbers.

    In which order `topk` names them is nobody's business.
    """
    if not (isinstance(value, tuple) and len(value) == 3 and all(isinstance(item, Tensor) for item in value)):
        return value
    logits, weights, experts = value
    if experts.is_floating_point() or weights.shape != experts.shape:
        return value
    return logits, weights.gather(-1, experts.argsort(dim=-1)), experts


def traced(model: nn.Module, call: Callable[[], Any]) -> Trace:
    """Runs `call` with hooks on `model` (named "") and every submodule, and returns what passed through them."""
    trace = Trace()

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs.get("hidden_states")
            seen = (hidden,) if hidden is not None else args[:1]
            trace.events.append(Event(name, "in", _copies(seen)))

        def after(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
            trace.events.append(Event(name, "out", _copies(output)))

        return before, after

    handles = []
    for name, module in model.named_modules():
        before, after = hooks(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return trace
