"""What a planted bug is: a record that says what is wrong, where it can occur and which level must kill it.

A bug is planted in our code, our config adapter, our rules or our loader, never in a number that a level computed.
Where it makes sense the same bug can be planted in the reference too: a run whose output it reproduces has found its
cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from bestiary.bridges import Bridge
from bestiary.models.config import DecoderConfig, HeadKind
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import config_defaults, tiny_configs

Plant = Callable[[OurSide], None]
"""Registers the bug with the side that a run will build."""

ReferencePlant = Callable[[nn.Module], AbstractContextManager[nn.Module]]
"""Yields a model with the bug: the one given, changed for the length of a block, or a sibling with the same weights."""


def everywhere(config: DecoderConfig) -> bool:
    """Applies to any decoder."""
    return True


def projects_keys(config: DecoderConfig) -> bool:
    """Whether attention has a projection for keys and one for values, and no latent of both."""
    return config.attention.mla is None


def anyone(bridge: Bridge) -> bool:
    """Applies to any bridge."""
    return True


def declares(*names: str) -> Callable[[Bridge], bool]:
    """Whether the reference's config class has one of the fields `names`."""
    return lambda bridge: any(name in config_defaults(bridge.reference) for name in names)


def writes(*names: str) -> Callable[[Bridge], bool]:
    """Whether the bridge writes one of the fields `names` into a config.json."""

    def serves(bridge: Bridge) -> bool:
        raw = next(iter(tiny_configs(bridge.reference).values()))
        written = bridge.config_to_hf(bridge.parse(raw).decoder)
        return any(name in written for name in names)

    return serves


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """One mutation.

    Attributes:
        id: unique, e.g. "C01_gate_up_swapped". The number is that of the catalogue of public bug reports it stands for.
        cause: the sentence a verdict shows as the likely cause.
        level: the cheapest level that must kill it, e.g. "V2".
        applies: whether a config has what the bug breaks; a family is concerned if one of its tiny configs is.
        serves: whether a bridge has what the bug breaks, where that is not a matter of the architecture.
        ours: plants it in our side.
        reference: plants it in the reference; None where the reference has no such place.
        config_fields: Hugging Face fields it misreads, for the reader of a verdict.
        checks: what a failing check says that names this cause, for bugs that no replay can name: V0, V1 and V3 name
            keys and fields, and a cheat is named by its guard.
        head: of the models that have the place it breaks; another head has a self-test of its own.
        quick: patterns of check ids to ask first, where the level is long; a survivor meets the whole level.
    """

    id: str
    cause: str
    level: str
    ours: Plant
    applies: Callable[[DecoderConfig], bool] = everywhere
    serves: Callable[[Bridge], bool] = anyone
    reference: ReferencePlant | None = None
    config_fields: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    head: HeadKind = HeadKind.LM
    quick: tuple[str, ...] = ()

    def concerns(self, bridge: Bridge, configs: Iterable[DecoderConfig]) -> bool:
        """Whether the bridge and one of its `configs` have what the bug breaks."""
        return self.serves(bridge) and any(self.applies(config) for config in configs)
