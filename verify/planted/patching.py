"""Ways to plant a bug in our side; the run that is given them undoes them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bestiary.bridges import Bridge
from bestiary.models.config import DecoderConfig
from bestiary.verify.planted.bug import Plant
from bestiary.verify.side import OurSide

Rules = tuple[Any, ...]


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block, whatever `owner` is: a module, a class, a frozen instance."""
    put = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    remove = type.__delattr__ if isinstance(owner, type) else object.__delattr__
    own = name in vars(owner)
    before = vars(owner).get(name)
    put(owner, name, value)
    try:
        yield
    finally:
        if own:
            put(owner, name, before)
        else:
            remove(owner, name)


def resolve(target: str) -> tuple[Any, str]:
    """The owner and the attribute name that "package.module:Class.method" means."""
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def patch(target: str, wrap: Callable[[Any], Any]) -> Plant:
    """Replaces the object at "package.module:name" by `wrap(object)`."""

    def plant(side: OurSide) -> None:
        owner, name = resolve(target)
        side.patch(owner, name, wrap(getattr(owner, name)))

    return plant


def built(target: str, change: Callable[[Any], None]) -> Plant:
    """Runs `change` on every instance of the class at `target` as soon as it is built."""

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def changed(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            change(self)

        return changed

    return patch(f"{target}.__init__", wrap)


def adapted(change: Callable[[DecoderConfig], DecoderConfig]) -> Plant:
    """The config adapter returns `change(config)`."""
    return lambda side: side.config(change)


def bridged(change: Callable[[Bridge], Bridge]) -> Plant:
    """The run uses `change(bridge)`."""
    return lambda side: side.bridge(change)


def ruled(change: Callable[[Rules], Rules]) -> Plant:
    """The bridge has the rules `change(rules)`, read and written."""
    return bridged(lambda bridge: replace(bridge, rules=change(bridge.rules)))


def written(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """The bridge writes `change(config.json)`."""
    return bridged(lambda bridge: replace(bridge, config_to_hf=lambda config: change(bridge.config_to_hf(config))))


def together(*plants: Plant) -> Plant:
    """Several plants at once, each at a place of its own."""

    def plant(side: OurSide) -> None:
        for one in plants:
            one(side)

    return plant


def override(module: Any, forward: Callable[..., Any]) -> None:
    """One module instance computes `forward` from now on; its parameters and names stay."""
    object.__setattr__(module, "forward", forward)


def exchange(a: Any, b: Any) -> None:
    """Two module instances compute each other's function from now on; names stay."""
    forward_a, forward_b = a.forward, b.forward
    override(a, forward_b)
    override(b, forward_a)
