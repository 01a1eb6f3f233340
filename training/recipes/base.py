"""What the loop asks of a recipe: batches, how much they count, and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.control import Control
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind

Batch = dict[str, Any]


@dataclass(frozen=True)
class LossSum:
    """What one micro-batch contributes: a sum, never a mean.

    Attributes:
        total: scalar with a graph, the sum over the units that `count` counts.
        metrics: scalars without one, sums over the same units.
    """

    total: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Recipe(Protocol):
    """A loss and the batches it reads; it touches no optimiser, no process, no log."""

    name: str
    unit: Literal["tokens", "sequences"]
    kinds: frozenset[Kind]

    def batch(self, pack: Pack) -> Batch:
        """What the loader yields."""
        ...

    def count(self, batch: Batch) -> int:
        """Units of a micro-batch, known before the forward pass."""
        ...

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """Forward pass and sum."""
        ...


@runtime_checkable
class Sliceable(Protocol):
    """A recipe that is exact where ranks of a context group have a slice of each row; batches then hold `context`.

    `documents.model_inputs` hands it to the model, whose log-probabilities are then 0 for the tokens of other ranks;
    `documents.token_sum` and `documents.document_sums` make sums of them that are those of the row.
    """

    slices: Literal[True]


@runtime_checkable
class Prepares(Protocol):
    """A recipe that looks at a whole step before its first micro-batch."""

    def prepare(self, model: Decoder, batches: Sequence[Batch], control: Control, rank: int, ranks: int) -> None:
        """Add to the batches of a step, in place, what their loss needs of all of them; before they are counted.

        Args:
            batches: all that this process has of the step, or of the held-out packs.
            rank, ranks: of this process among those with different data, all of which call at once.
        """
        ...
