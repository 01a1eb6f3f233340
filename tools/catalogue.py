"""The families and sizes of `bestiary.models`, with parameter counts taken from the modules themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

import bestiary.models
from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder


class NoSuchFamily(BestiaryError):
    """A family name that `bestiary.models` does not export."""


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One size of one family; `parameters` counts distinct parameters (a tied head once)."""

    family: str
    model_type: str
    size: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int

    def as_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)


def families() -> dict[str, type[Decoder]]:
    """The family classes that `bestiary.models` exports, by class name, in the order of its `__all__`."""
    exported = {name: getattr(bestiary.models, name) for name in bestiary.models.__all__}
    return {
        name: item
        for name, item in exported.items()
        if isinstance(item, type) and issubclass(item, Decoder) and item is not Decoder and item.sizes
    }


def list_models(*, family: str | None = None) -> list[ModelRow]:
    """One row per size, built on the meta device (no memory, no download).

    Args:
        family: class name ("Qwen3") or model_type ("qwen3") to keep; None keeps all.

    Raises:
        NoSuchFamily: `family` names none of them.
    """
    rows = [
        _row(name, size, cls)
        for name, cls in families().items()
        for size, config in cls.sizes.items()
        if family is None or family in (name, config.model_type)
    ]
    if not rows:
        raise NoSuchFamily(f"family = {family!r} is not in the zoo.", remedy=f"choose one of {', '.join(families())}")
    return rows


def _row(family: str, size: str, cls: type[Decoder]) -> ModelRow:
    config = cls.sizes[size]
    with torch.device("meta"):
        model = cls(config)
    return ModelRow(
        family=family,
        model_type=config.model_type,
        size=size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
