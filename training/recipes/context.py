"""A recipe whose rows are shared by the ranks of a context group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bestiary.models import Decoder
from bestiary.training.control import Control
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind
from bestiary.training.errors import InvalidRun
from bestiary.training.parallel_context import Context
from bestiary.training.recipes.base import Batch, LossSum, Prepares, Recipe, Sliceable


class InContext:
    """`recipe`, whose batches know the ranks that share their rows.

    Args:
        recipe: a `Sliceable` one.   context: of this process.
    Raises:
        InvalidRun: a recipe that needs whole rows.
    """

    def __init__(self, recipe: Recipe, context: Context) -> None:
        if not isinstance(recipe, Sliceable):
            raise InvalidRun(
                f"parallel.context = {context.size} with the recipe {recipe.name}, which needs whole rows.",
                remedy="parallel.context = 1, and the processes to parallel.shard; a recipe of yours says slices = "
                "True where its sums hold for slices (bestiary.training.recipes.base.Sliceable)",
            )
        self.recipe, self.context = recipe, context
        self.name: str = recipe.name
        self.unit: Literal["tokens", "sequences"] = recipe.unit
        self.kinds: frozenset[Kind] = recipe.kinds

    def batch(self, pack: Pack) -> Batch:
        """The recipe's own, of the whole row, and `context`."""
        return self.recipe.batch(pack) | {"context": self.context}

    def count(self, batch: Batch) -> int:
        """Units of the whole row."""
        return self.recipe.count(batch)

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """A sum whose mean over the ranks is that of the whole row, and so is its gradient."""
        return self.recipe.loss(model, batch)

    def prepare(self, model: Decoder, batches: Sequence[Batch], control: Control, rank: int, ranks: int) -> None:
        """As of the recipe, if it looks at whole steps."""
        if isinstance(self.recipe, Prepares):
            self.recipe.prepare(model, batches, control, rank, ranks)
