"""`Piece`: one rectangle of a hub tensor that is one rectangle of a parameter of ours.

Every rule of a bridge, whatever it is called, comes down to such pieces. They are read in both directions, can be cut
to the slice that one rank owns, and can be counted, so that "each element exactly once" is arithmetic, not a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from bestiary.bridges.mxfp4 import BLOCK, BLOCK_BYTES

Shape = tuple[int, ...]
Index = tuple[slice | int, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor as the hub names and shapes it; with `packed`, stored as `…_blocks` and `…_scales` in MXFP4."""

    name: str
    shape: Shape
    packed: bool = False

    @property
    def stored(self) -> dict[str, Shape]:
        """Name and shape of what the file holds."""
        if not self.packed:
            return {self.name: self.shape}
        grid = (*self.shape[:-1], self.shape[-1] // BLOCK)
        return {f"{self.name}_blocks": (*grid, BLOCK_BYTES), f"{self.name}_scales": grid}


@dataclass(frozen=True, slots=True)
class Piece:
    """`parameter[dest]` equals `hub[source]`, or its transpose over the last two axes.

    Attributes:
        source: one slice (start, stop, step) per axis of the hub tensor.
        dest: one slice (step 1) or integer per axis of the parameter; the slices are the axes of `source`, in order.
    """

    hub: HubTensor
    source: Box
    dest: Index
    transposed: bool = False

    @classmethod
    def whole(cls, hub: HubTensor) -> Piece:
        """The hub tensor as it is."""
        full = tuple(slice(0, size, 1) for size in hub.shape)
        return cls(hub, full, full)

    @property
    def numel(self) -> int:
        """Elements it carries."""
        return prod(len(range(s.start, s.stop, s.step)) for s in self.source)

    @property
    def covers_hub(self) -> bool:
        """Whether the hub tensor is carried entirely."""
        return self.numel == prod(self.hub.shape)

    def read(self, hub: Tensor, parameter: Tensor) -> None:
        """Copy the piece from the hub tensor into the parameter, casting to the parameter's dtype."""
        region = hub[self.source]
        parameter[self.dest].copy_(region.mT if self.transposed else region)

    def view(self, parameter: Tensor) -> Tensor:
        """The piece of the parameter, oriented as `hub[source]`; no copy."""
        region = parameter[self.dest]
        return region.mT if self.transposed else region

    def write(self, hub: Tensor, parameter: Tensor) -> None:
        """Copy the piece from the parameter into the hub tensor."""
        hub[self.source].copy_(self.view(parameter))

    def source_axis(self, dest_axis: int) -> int:
        """The axis of the hub tensor that runs along `dest_axis` of the parameter (which must be a slice in `dest`)."""
        axes = [axis for axis, index in enumerate(self.dest) if isinstance(index, slice)]
        if self.transposed:
            axes[-1], axes[-2] = axes[-2], axes[-1]
        return axes.index(dest_axis)

    def within(self, box: Box) -> Piece | None:
        """The part inside `box` of the parameter, `dest` counted from the box's corner; None if there is none.

        This is how a rank reads its shard: `box` is what it owns.
        """
        source, dest = list(self.source), list(self.dest)
        for axis, (index, bound) in enumerate(zip(self.dest, box, strict=True)):
            if isinstance(index, int):
                if not bound.start <= index < bound.stop:
                    return None
                dest[axis] = index - bound.start
                continue
            low, high = max(index.start, bound.start), min(index.stop, bound.stop)
            if low >= high:
                return None
            dest[axis] = slice(low - bound.start, high - bound.start, 1)
            source_axis = self.source_axis(axis)
            source[source_axis] = _advance(source[source_axis], low - index.start, high - index.start)
        return replace(self, source=tuple(source), dest=tuple(dest))

    def rows(self, start: int, stop: int) -> Piece | None:
        """The part in rows [start, stop) of the hub tensor, `source` counted from `start`; None if there is none."""
        rows = self.source[0]
        first = max(0, -(-(start - rows.start) // rows.step))
        last = min(len(range(rows.start, rows.stop, rows.step)), -(-(stop - rows.start) // rows.step))
        if first >= last:
            return None
        dest = list(self.dest)
        axis = next(a for a, i in enumerate(self.dest) if isinstance(i, slice) and self.source_axis(a) == 0)
        along = self.dest[axis]
        assert isinstance(along, slice)
        dest[axis] = slice(along.start + first, along.start + last, 1)
        kept = _advance(rows, first, last)
        moved = slice(kept.start - start, kept.stop - start, kept.step)
        return replace(self, source=(moved, *self.source[1:]), dest=tuple(dest))


def _advance(index: slice, first: int, last: int) -> slice:
    """Elements first … last − 1 of `index`."""
    start = index.start + first * index.step
    return slice(start, start + (last - 1 - first) * index.step + 1, index.step)


def extent(pieces: Sequence[Piece]) -> int:
    """Elements that `pieces` carry together."""
    return sum(piece.numel for piece in pieces)
