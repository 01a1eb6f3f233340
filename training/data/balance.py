"""Equal work for the ranks of a step: packs are equally long, and yet a long document costs more than many short ones.

Attention grows with the square of a document's length, everything else with its tokens. For a 7B model the two are
equal at about 24 600 tokens, so below some thousands there is nothing to balance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.packing import Pack


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a pack: Σ over its documents of linear·n + quadratic·n², the padding one among them.

    Attributes:
        linear, quadratic: in any unit. `Cost.of_model` derives them.
    """

    linear: float = 24_576.0
    quadratic: float = 1.0

    @classmethod
    def of_model(cls, parameters: int, layers: int, attention_width: int) -> "Cost":
        """FLOPs of a training step: 6 per parameter and token; 6·layers·width per pair of tokens (causal: half of 12).

        Args:
            parameters: that multiply a token (active ones).   attention_width: heads × head size.
        """
        return cls(6.0 * parameters, 6.0 * layers * attention_width)

    def __call__(self, pack: Pack) -> float:
        """The work of one pack."""
        lengths = np.diff(pack.borders).astype(np.float64)
        return float(self.linear * lengths.sum() + self.quadratic * (lengths**2).sum())


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which packs each rank takes: as many for each, the dearest rank as cheap as two simple rules make it.

    Longest first onto the cheapest rank that has room, then swaps between the dearest and any other while they help.

    Args:
        costs: of the packs of one step; their number is a multiple of `ranks`.

    Returns:
        Indices by rank, rising; a function of the arguments alone.

    Raises:
        InvalidPlan: the packs do not divide.
    """
    if len(costs) % ranks:
        raise InvalidPlan(f"{len(costs)} packs for {ranks} ranks.", remedy="Plan.streams a multiple of the world size")
    room = len(costs) // ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        rank = min((rank for rank in range(ranks) if len(taken[rank]) < room), key=lambda one: (sums[one], one))
        taken[rank].append(index)
        sums[rank] += costs[index]
    while swap := _best_swap(costs, taken, sums):
        dear, mine, other, theirs = swap
        taken[dear][mine], taken[other][theirs] = taken[other][theirs], taken[dear][mine]
        sums = [sum(costs[index] for index in own) for own in taken]
    return [sorted(own) for own in taken]


def _best_swap(
    costs: Sequence[float], taken: Sequence[Sequence[int]], sums: Sequence[float]
) -> tuple[int, int, int, int] | None:
    """The exchange of one pack of the dearest rank that lowers the dearer of the two most; None if none does."""
    dear = max(range(len(sums)), key=lambda rank: sums[rank])
    best, found = sums[dear] * (1 - 1e-12), None
    for mine, index in enumerate(taken[dear]):
        for other in range(len(sums)):
            for theirs, their in enumerate(taken[other]) if other != dear else ():
                moved = costs[index] - costs[their]
                dearer = max(sums[dear] - moved, sums[other] + moved)
                if moved > 0 and dearer < best:
                    best, found = dearer, (dear, mine, other, theirs)
    return found
