"""What all processes of a run decide together: sums over a step's data, whether to stop, errors of one shape."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from bestiary.kernels.errors import BestiaryError
from bestiary.training.errors import OutOfMemory, RankLost

T = TypeVar("T")
_CPU_MEMORY = "DefaultCPUAllocator"  # torch's only word for it on a CPU


@dataclass(frozen=True)
class Control:
    """The processes of a run, small values between them.

    Attributes:
        group: of all of them, on gloo, so that it never queues behind gradients; None: there is one.
        copies: processes that are given the same data (tensor and expert parallel ones).
    """

    group: dist.ProcessGroup | None = None
    copies: int = 1

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over the data of all processes, in float64, the same on each of them."""
        if self.group is None:
            return dict(values)
        names = sorted(values)
        row = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(row, group=self.group)
        return {name: total / self.copies for name, total in zip(names, row.tolist(), strict=True)}

    def gathered(self, value: T) -> list[T]:
        """The value of every process; small ones, they travel as pickles."""
        if self.group is None:
            return [value]
        every: list[T | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, value, group=self.group)
        return [cast(T, one) for one in every]

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.group is None or dist.get_rank(self.group) == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.group is not None:
            dist.barrier(group=self.group)


def decided(find: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What one process finds out for all, who would find different things in files or on a hub that somebody writes to.

    Args:
        find: called in the first process; what it returns travels as a pickle.
        group: of all of them, which call this at once; None: there is one.
    Raises:
        BestiaryError: that of `find`, in all of them, who would wait.
    """
    if group is None:
        return find()
    found: list[T | BestiaryError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            found = [find()]
        except BestiaryError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0, group=group)
    if isinstance(found[0], BestiaryError):
        raise found[0]
    return cast(T, found[0])


class Interruption:
    """A request to stop by SIGTERM or SIGINT, heard after the step that runs; a second one ends at once."""

    def __init__(self) -> None:
        self.by: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals set `by` inside; a thread that is not the main one hears none."""
        known = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                known[number] = signal.signal(number, self._heard)
            except ValueError:  # only the main thread may listen
                break
        try:
            yield
        finally:
            for number, handler in known.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name


@contextmanager
def named_failures(estimate: str, timeout_s: float) -> Iterator[None]:
    """Failures of a run that torch and Python report in their own words, as errors that say what to do.

    Args:
        estimate: of the step's memory, in words.   timeout_s: after which a silent process is given up.
    Raises:
        OutOfMemory, RankLost.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _no_memory(estimate) from error
    except (dist.DistError, RuntimeError) as error:
        text = str(error)
        if _CPU_MEMORY in text:
            raise _no_memory(estimate) from error
        if isinstance(error, dist.DistError) or "gloo" in text.lower() or "Connection" in text:
            raise RankLost(
                f"another process of the run died or did not answer within {timeout_s:.0f} s "
                f"({text.splitlines()[0][:160]}).",
                remedy="look for the first error among the processes' output; the same command goes on from the newest "
                "checkpoint",
            ) from error
        raise


def _no_memory(estimate: str) -> OutOfMemory:
    return OutOfMemory(
        f"the run does not fit into memory. Estimated need: {estimate}.",
        remedy="a smaller data.pack_length; model.checkpointing=full; adapters (lora.r=16) or more processes "
        "(parallel.shard) for fewer optimiser states; where answers are sampled, fewer rollouts.rows",
    )
