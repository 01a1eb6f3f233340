"""Weights in the layout that oneDNN reads fastest, for as long as a block of code that uses each of them many times.

A weight (out, in) lies row by row, but a product of few rows wants it in tiles. Left as it is, oneDNN gathers the tiles
at every call. Two cores of a Zen 5, GB/s of weight read by 16 rows, as it lies and packed ahead:
    fp32   (2048, 640) 21, 33     (640, 2048) 24, 34     (256, 640) 17, 23     (262144, 640) 19, 36
    bf16   (2048, 640) 20, 29
Packing costs about twelve such products, and the weight's size in memory until the block ends.

A packed weight is a copy, so it must never outlive what it was copied from: before each use the weight's address and
version are compared. Writes that torch does not count (through `.data` or a NumPy view of the memory) are not seen, so
a block must not run code of others; it is for whoever owns the loop, as `models.generation` does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

USES = 24  # products a weight, below which packing is not worth it
BYTES = 2**31  # of weights packed in one block, the first ones that are used
_ROWS = 16  # that the layout is made for; it is the best one from 2 rows on


@dataclass(frozen=True)
class _Packed:
    """A copy, and what it was made of.

    Attributes:
        source: shares memory and version counter with the weight, so the address is nobody else's while it is here.
        version: of the source when it was copied.
        copy: in oneDNN's layout.
    """

    source: Tensor
    version: int
    copy: Tensor


class _Block:
    """The packed weights of one block of code, whose products have `rows` rows at most."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._packed: dict[tuple[object, ...], _Packed | None] = {}
        self._left = BYTES

    def of(self, weight: Tensor) -> Tensor:
        """Its packed copy; the weight itself where there is none."""
        place = (weight.data_ptr(), weight.shape, weight.dtype)
        if place not in self._packed:
            self._packed[place] = self._new(weight)
        found = self._packed[place]
        if found is None:
            return weight
        if weight._version != found.version or found.source._version != found.version:
            self._packed[place] = None  # somebody writes it: what is written once may be written again
            self._left += found.source.nbytes
            return weight
        return found.copy

    def _new(self, weight: Tensor) -> _Packed | None:
        if weight.nbytes > self._left or not _is_parameter(weight):
            return None
        source = weight.detach()
        version = source._version
        self._left -= source.nbytes
        return _Packed(source, version, _pack(source))

    def clear(self) -> None:
        """Let go of all copies."""
        self._packed.clear()


_block: ContextVar[_Block | None] = ContextVar("bestiary_packed_weights", default=None)


@contextmanager
def packed_weights(*, uses: int, rows: int) -> Iterator[None]:
    """Pack each weight that `kernels.linear` meets inside the block at its first product of at most `rows` rows.

    Only without gradients, on CPUs, in fp32 and bf16, only parameters and parts of them, and only in this thread (or
    task). A block inside a block keeps its own copies. At the end, also after an exception, all copies are gone.

    Args:
        uses: how often the block will use each weight; below `USES` nothing is packed.
        rows: at most, of the products that there will be many of; larger ones read the weights where they lie.
    Cost:
        At most `BYTES` of memory; which weights are packed depends on the order of their use, shapes and dtypes alone.
    """
    block = _Block(rows) if uses >= USES and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") else None
    before = _block.set(block)
    try:
        yield
    finally:
        _block.reset(before)
        if block is not None:
            block.clear()


def packs() -> bool:
    """Whether weights are packed here and now; never in a graph, whose products are the compiler's."""
    return not torch.compiler.is_compiling() and _block.get() is not None and not torch.is_grad_enabled()


def packed(weight: Tensor, rows: int) -> Tensor:
    """What oneDNN's inner product of `rows` rows should read: the weight, or inside `packed_weights` its packed copy.

    Fewer rows than the block is for are what is left of them when some are done.

    Args:
        weight: (out, in), contiguous, fp32 or bf16, on the CPU.
    """
    block = _block.get()
    if block is None or rows > block.rows or torch.is_grad_enabled():
        return weight
    if rows == 1 and weight.dtype == torch.float32:
        return weight  # there is nothing to gather for, and at most an eighth to gain
    return block.of(weight)


def _pack(weight: Tensor) -> Tensor:
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight, _ROWS)
    return copy


def _is_parameter(weight: Tensor) -> bool:
    """Whether it is a parameter or a part of one: all else may be gone after one product.

    An inference tensor counts no writes.
    """
    whole = weight._base if weight._is_view() else weight
    return isinstance(whole, torch.nn.Parameter) and not weight.is_inference()
