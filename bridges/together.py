"""Exports of a model that is spread over processes: all gather, one writes, and all learn how it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from bestiary.bridges.errors import UnsupportedLoad
from bestiary.bridges.writing import check_free

Supply = Callable[[str], Tensor]


def first_writes(
    target: Path, write: Callable[[Supply], None], supply: Supply, order: Sequence[str], *, overwrite: bool
) -> None:
    """Run `write` on the first process; the others take their part in gathering each tensor, and wait for the end.

    Args:
        write: asks what it is given for the tensors of `order`, in that order.
        supply: gathers one tensor; every process calls it.
    Raises:
        FolderNotEmpty: on the first process, before anything is gathered.
        UnsupportedLoad: on the others, when the first one failed; that one raises what it met.
    """
    first = dist.get_rank() == 0
    if first:
        with _told():
            check_free(target, overwrite=overwrite)
    else:
        _learn(target)
    if not first:
        for name in order:
            supply(name)
        _learn(target)
        return
    asked: list[str] = []

    def counted(name: str) -> Tensor:
        asked.append(name)
        return supply(name)

    with _told():
        try:
            write(counted)
        finally:
            for name in order[len(asked) :]:  # after a failure: the others are on their way through all of them
                supply(name)


@contextmanager
def _told() -> Iterator[None]:
    """Tells the other processes whether the block went well."""
    said: str | None = "it was interrupted"
    try:
        yield
        said = None
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise
    finally:
        dist.broadcast_object_list([said], src=0)


def _learn(target: Path) -> None:
    said: list[str | None] = [None]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise UnsupportedLoad(
            f"{target} was not written: the first process says: {said[0]}", remedy="see the error of the first process"
        )
