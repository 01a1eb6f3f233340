"""What a producer process keeps in memory while it reads, templates, masks and packs many tokens."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from bestiary.training.data.loader import PackLoader
from bestiary.training.data.packing import Pack
from bestiary.training.data.plan import Plan

MEGABYTE = 1 << 20
SAMPLES = 100


@dataclass(frozen=True)
class Watched:
    """Resident bytes of a producer.

    Attributes:
        resident: after each hundredth of the tokens, the first when the first pack was there.
        tokens, seconds: of the whole.
    """

    resident: tuple[int, ...]
    tokens: int
    seconds: float

    @property
    def growth(self) -> int:
        """The most of the last tenth over the most of the second tenth (of ten million tokens, behind the first)."""
        tenth = len(self.resident) // 10
        return max(self.resident[-tenth:]) - max(self.resident[tenth : 2 * tenth])

    @property
    def held(self) -> int:
        """The most at any time, over what was there with the first pack."""
        return max(self.resident) - self.resident[0]


def watch(plan: Plan, tokens: int) -> Watched:
    """Takes packs of one producer process as fast as it makes them.

    Args:
        plan: without an end.   tokens: useful ones, to take.
    """
    others = {process.pid for process in multiprocessing.active_children()}
    loader = PackLoader(plan, workers=1, make=_useful)
    try:
        packs = iter(loader)
        (started,) = (one for one in multiprocessing.active_children() if one.pid not in others)
        producer = psutil.Process(started.pid)
        taken, resident = next(packs), [producer.memory_info().rss]
        start, first = time.perf_counter(), taken
        for useful in packs:
            taken += useful
            if taken * SAMPLES >= tokens * len(resident):
                resident.append(producer.memory_info().rss)
            if taken >= tokens:
                break
        return Watched(tuple(resident), taken, (time.perf_counter() - start) * taken / (taken - first))
    finally:
        loader.close()


def in_megabytes(sizes: Sequence[int]) -> list[float]:
    """For a report."""
    return [round(size / MEGABYTE, 1) for size in sizes]


def _useful(pack: Pack) -> int:
    return pack.useful_tokens
