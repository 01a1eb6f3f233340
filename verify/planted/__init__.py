"""The catalogue of planted bugs: the verifier's own regression suite."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from bestiary.kernels.errors import BestiaryError
from bestiary.models.config import HeadKind
from bestiary.verify.planted import (
    attention,
    cheats,
    configs,
    dense,
    experts,
    kernels,
    keys,
    losses,
    masks,
    mixtures,
    narrow,
    norms,
    precision,
    rope,
    score,
    switches,
)
from bestiary.verify.planted.bug import Plant, PlantedBug, ReferencePlant

__all__ = ["CATALOGUE", "BadCatalogue", "Plant", "PlantedBug", "ReferencePlant", "catalogue_with"]

CATALOGUE: tuple[PlantedBug, ...] = tuple(
    bug
    for module in (
        attention,
        rope,
        masks,
        norms,
        dense,
        experts,
        mixtures,
        keys,
        configs,
        losses,
        precision,
        narrow,
        switches,
        kernels,
        cheats,
    )
    for bug in module.BUGS
)


class BadCatalogue(BestiaryError):
    """A module given to `--catalogue` that cannot be imported or holds no `BUGS`, or an id that exists already.

    Remedy: give a module on PYTHONPATH with a list `BUGS` of new ids.
    """


def catalogue_with(modules: Iterable[str], head: HeadKind = HeadKind.LM) -> tuple[PlantedBug, ...]:
    """The catalogue of a head and the `BUGS` of further modules.

    Raises:
        BadCatalogue: names the module or the id.
    """
    bugs = list(CATALOGUE if head is HeadKind.LM else score.BUGS)
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise BadCatalogue(
                f"--catalogue {name} cannot be imported ({error}).", remedy="give a module on the import path"
            ) from error
        extra = vars(module).get("BUGS")
        if not isinstance(extra, tuple | list) or not all(isinstance(bug, PlantedBug) for bug in extra):
            raise BadCatalogue(
                f"--catalogue {name} has no BUGS, a tuple of bestiary.verify.planted.PlantedBug.",
                remedy="define BUGS in the module",
            )
        bugs += extra
    seen: set[str] = set()
    for bug in bugs:
        if bug.id in seen:
            raise BadCatalogue(f"two planted bugs are called {bug.id}.", remedy="rename one")
        seen.add(bug.id)
    return tuple(bugs)
