"""Tensors in buckets of bounded size, as they travel between processes: bytes that nobody has to copy to send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.training.rl.weight_sync import SyncFailed

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Parcel:
    """A run of bytes of one tensor.

    Attributes:
        name, shape, dtype: of the tensor.   start: the first byte of it.   data: (n,) uint8.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    data: NDArray[np.uint8]

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


Bucket = Sequence[Parcel]


def buckets(tensors: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Tensors as lists of parcels, each list at most `most` bytes; a larger tensor comes in several."""
    filled: list[Parcel] = []
    room = most
    for name, tensor in tensors:
        raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        start = 0
        while start < len(raw) or not len(raw):
            if not room:
                yield filled
                filled, room = [], most
            taken = raw[start : start + room]
            # A copy: the next optimiser step writes where these bytes lie.
            filled.append(Parcel(name, tuple(tensor.shape), tensor.dtype, start, taken.copy()))
            start, room = start + len(taken), room - len(taken)
            if not len(raw):
                break
    if filled:
        yield filled


def tensors_of(received: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, each once all of its bytes are there.

    Raises:
        SyncFailed: bytes are missing between parcels, or at the end.
    """
    open_name, memory, filled = "", np.zeros(0, np.uint8), 0
    for bucket in received:
        for parcel in bucket:
            if parcel.start == 0:
                _check_whole(open_name, filled, len(memory))
                open_name, memory, filled = parcel.name, np.empty(parcel.bytes, np.uint8), 0
            if parcel.name != open_name or parcel.start != filled:
                raise SyncFailed(
                    f"byte {parcel.start} of tensor {parcel.name} came behind byte {filled} of {open_name or 'none'}.",
                    remedy="sync again",
                )
            memory[filled : filled + len(parcel.data)] = parcel.data
            filled += len(parcel.data)
            if filled == len(memory):
                yield parcel.name, _tensor(memory, parcel)
    _check_whole(open_name, filled, len(memory))


def _tensor(memory: NDArray[Any], parcel: Parcel) -> Tensor:
    flat = torch.from_numpy(memory) if len(memory) else torch.zeros(0, dtype=torch.uint8)
    return flat.view(parcel.dtype).reshape(parcel.shape)


def _check_whole(name: str, filled: int, length: int) -> None:
    if filled != length:
        raise SyncFailed(f"tensor {name} ends after {filled} of {length} bytes.", remedy="sync again")
