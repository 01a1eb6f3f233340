"""Names that a run's file gives, checked against those that exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from bestiary.training.errors import InvalidRun


def known(name: str, names: Iterable[str], key: str) -> str:
    """`name`, if it is one of `names`.

    Raises:
        InvalidRun: it is not; names the key, the value and the nearest name.
    """
    every = list(names)
    if name not in every:
        near = get_close_matches(name, every, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise InvalidRun(f"{key} = {name!r}.", remedy=f"{meant}One of {', '.join(every)}")
    return name
