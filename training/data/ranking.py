"""How well items are ranked: over the whole catalogue, never a sample of it, one right item a user or several."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.errors import SampleRefused

Item = TypeVar("Item")
NOT_RANKED = 0


def ranks_by_score(scores: NDArray[np.floating], targets: NDArray[np.integer]) -> NDArray[np.int64]:
    """Rank of each user's item, from 1; items with an equal score stand before it, so that a constant gains nothing.

    Nor does a score that is no number: it counts as equal to all.

    Args:
        scores: (users, items).   targets: (users,).
    """
    own = scores[np.arange(len(targets)), targets][:, None]
    return np.asarray((~(scores < own)).sum(1), np.int64)


def ranks_in_lists(lists: Sequence[Sequence[int]], targets: Sequence[int]) -> NDArray[np.int64]:
    """Rank of each user's item in a ranked list, from 1; `NOT_RANKED` where it is not in it."""
    found = (
        list(items).index(target) + 1 if target in items else 0 for items, target in zip(lists, targets, strict=True)
    )
    return np.fromiter(found, np.int64)


def recall_at(ranks: NDArray[np.int64], k: int) -> float:
    """Share of users whose item stands among the first k (also called hit rate)."""
    return float(((ranks != NOT_RANKED) & (ranks <= k)).mean())


def ndcg_at(ranks: NDArray[np.int64], k: int) -> float:
    """Mean of 1 / log2(rank + 1) where the item stands among the first k, else 0."""
    hit = (ranks != NOT_RANKED) & (ranks <= k)
    return float(np.where(hit, 1.0 / np.log2(np.maximum(ranks, 1) + 1.0), 0.0).mean())


def discounts(count: int) -> NDArray[np.float64]:
    """(count,): what a right item is worth at each rank, 1 / log2(rank + 1)."""
    return 1.0 / np.log2(np.arange(count) + 2.0)


def ndcg_of_lists(
    lists: Sequence[Sequence[int]], relevant: Sequence[Collection[int] | Mapping[int, float]], k: int
) -> NDArray[np.float64]:
    """NDCG@k of each user with several right items: (users,), 1 where the first places are the best, in their order.

    Args:
        lists: ranked, no item twice; what is missing of k counts for nothing.
        relevant: at least one item each; worth 1 each, or what a mapping says, above 0.
    """
    worth = discounts(k)
    gains = [right if isinstance(right, Mapping) else dict.fromkeys(right, 1.0) for right in relevant]
    gained = [
        sum(worth[rank] * gain.get(item, 0.0) for rank, item in enumerate(shown[:k]))
        for shown, gain in zip(lists, gains, strict=True)
    ]
    return np.array(gained) / np.array([ideal_gain(gain.values(), worth) for gain in gains])


def ideal_gain(gains: Iterable[float], worth: NDArray[np.float64]) -> float:
    """What the best list earns: the largest gains at the first places of `worth`."""
    best = np.sort(np.fromiter(gains, np.float64))[::-1][: len(worth)]
    return float(best @ worth[: len(best)])


def mean_reciprocal_rank(ranks: NDArray[np.int64]) -> float:
    """Mean of 1 / rank, 0 where the item is not ranked."""
    return float(np.where(ranks != NOT_RANKED, 1.0 / np.maximum(ranks, 1), 0.0).mean())


def coverage(lists: Sequence[Sequence[int]], items: int) -> float:
    """Share of the catalogue that is shown to anybody."""
    return len({item for shown in lists for item in shown}) / items


@dataclass(frozen=True)
class LeaveOneOut(Generic[Item]):
    """Histories without their last two events, and the two tasks made of these.

    Attributes:
        training: user → history.
        validation, test: user → (history, the event that follows); test's history holds validation's event.
    """

    training: Mapping[str, Sequence[Item]]
    validation: Mapping[str, tuple[Sequence[Item], Item]]
    test: Mapping[str, tuple[Sequence[Item], Item]]


def leave_one_out(histories: Mapping[str, Sequence[Item]]) -> LeaveOneOut[Item]:
    """The last event of each user for the test, the one before for validation; short histories only train.

    Raises:
        SampleRefused: an empty history.
    """
    if empty := [user for user, events in histories.items() if not len(events)]:
        raise SampleRefused(f"user {empty[0]!r} has no events.")
    long = {user: events for user, events in histories.items() if len(events) >= 3}
    return LeaveOneOut(
        training={user: events[:-2] if user in long else events for user, events in histories.items()},
        validation={user: (events[:-2], events[-2]) for user, events in long.items()},
        test={user: (events[:-1], events[-1]) for user, events in long.items()},
    )
