"""Context parallelism: the ranks of one group share every row, and gather the keys and values of its tokens.

A rank computes two pieces of each row, one from its front and the one as far from its end: causal queries see the more
keys the later they stand, and so all ranks have about the same work. Queries see all keys at once, so windows, sinks
and soft caps are those of one process. It sends 2 · (ranks − 1) / ranks · T · heads_kv · d elements a layer and rank
forward, as many backward, and keeps the keys and values of whole rows; everything else is T / ranks tokens.

Ranks of a context group are given the same rows. What a recipe sums over tokens is a share on each, and its gradient
too, while FSDP2 and `Control.sums` take means over them: `shares` makes up for that. What it sums over documents
before something that is no sum goes through `total`, and from there on is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bestiary.models.context import ContextSlice
from bestiary.training.errors import ParallelRefused
from bestiary.training.parallel_collectives import enter, gather_heads, total
from bestiary.training.parallel_mesh import CONTEXT, check_mesh, size


@dataclass(frozen=True)
class Context:
    """The ranks that share every row.

    Attributes:
        rank, size: this one's place among them.   group: they.
    """

    rank: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Context | None:
        """That of `build_mesh`'s mesh; None: rows are whole."""
        check_mesh(mesh)
        if size(mesh, CONTEXT) == 1:
            return None
        return cls(mesh.get_local_rank(CONTEXT), size(mesh, CONTEXT), mesh.get_group(CONTEXT))

    def slice_of(self, length: int, device: torch.device) -> ContextSlice:
        """This rank's part of rows of `length` tokens, as `Decoder.forward` takes it.

        Raises:
            ParallelRefused: fewer tokens than pieces.
        """
        if length < 2 * self.size:
            raise ParallelRefused(
                f"rows of {length} tokens in 2 · parallel.context = {2 * self.size} pieces.",
                remedy="longer rows (data.pack_length), or a smaller parallel.context",
            )
        every = [_pieces(length, self.size, rank) for rank in range(self.size)]
        places, rows = _places(length, self.size)
        gather = partial(gather_heads, group=self.group, places=places.to(device), rows=rows)
        return ContextSlice(length, every[self.rank], gather)

    def total(self, x: Tensor) -> Tensor:
        """Σ over the ranks, the same on each; a gradient is the sum of those that the ranks have for it."""
        return enter(total(x, self.group), self.group)

    def shares(self, x: Tensor) -> Tensor:
        """This rank's share of a sum, so that the mean over the ranks is the sum."""
        return x * self.size


def _pieces(length: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Piece `rank` from the front and from the end, of 2 · ranks as equal as can be; the last rank's two are one."""
    borders = [place * length // (2 * ranks) for place in range(2 * ranks + 1)]
    last = 2 * ranks - 1 - rank
    if last == rank + 1:
        return ((borders[rank], borders[last + 1]),)
    return (borders[rank], borders[rank + 1]), (borders[last], borders[last + 1])


@lru_cache(maxsize=16)
def _places(length: int, ranks: int) -> tuple[Tensor, int]:
    """(T,) where each token lies among what all ranks have, each padded to as many rows; and those rows."""
    own = [
        torch.cat([torch.arange(start, end) for start, end in _pieces(length, ranks, rank)]) for rank in range(ranks)
    ]
    rows = max(len(tokens) for tokens in own)
    places = torch.empty(length, dtype=torch.int64)
    for rank, tokens in enumerate(own):
        places[tokens] = torch.arange(len(tokens)) + rank * rows
    return places, rows
