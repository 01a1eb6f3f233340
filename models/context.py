"""A part of every row: what one of several computes of it while the keys and values are those of all tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bestiary.models.errors import InvalidInput

Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ContextSlice:
    """The tokens of each row that this forward pass computes; others compute the rest at the same time.

    Everything but attention treats tokens one by one, so the slice is all that a layer knows of. In attention it takes
    the place of a cache: `append` gives the keys and values that its queries may look at.

    Attributes:
        length: tokens T of the whole row.
        pieces: (start, end) of the slice's tokens in the row, ascending and apart; at least one, none of them empty.
        gather: keys and values of the slice (B, heads, own, d), own tokens in the order of `pieces`, to those of the
            whole row (B, heads, T, d) in its order, with a gradient. Every layer calls it once a pass, and once more
            where activation checkpointing repeats it.
    Raises:
        InvalidInput: pieces that are no part of the row.
    """

    length: int
    pieces: tuple[tuple[int, int], ...]
    gather: Gather

    def __post_init__(self) -> None:
        borders = [border for piece in self.pieces for border in piece]
        rising = all(start < end for start, end in self.pieces) and all(a <= b for a, b in pairwise(borders))
        if not borders or not rising or borders[0] < 0 or borders[-1] > self.length:
            raise InvalidInput(
                f"ContextSlice.pieces = {self.pieces} of a row of {self.length} tokens.",
                remedy="(start, end) of one piece or more, none empty, ascending and inside the row",
            )

    @property
    def own(self) -> int:
        """Tokens of the slice."""
        return sum(end - start for start, end in self.pieces)

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """The slice's tokens of a tensor over the row."""
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.pieces], dim)

    def placed(self, x: Tensor) -> Tensor:
        """(B, own) → (B, T), with 0 for the tokens of others."""
        parts, reached = [], 0
        for own, (start, end) in zip(x.split([end - start for start, end in self.pieces], 1), self.pieces, strict=True):
            parts += [x.new_zeros(len(x), start - reached), own]
            reached = end
        return torch.cat([*parts, x.new_zeros(len(x), self.length - reached)], 1)

    def append(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the whole row for layer `index`."""
        return self.gather(k, v)
