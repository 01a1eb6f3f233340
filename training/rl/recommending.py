"""A recommender's world: a moment in what a user did, items that the policy shows, and what the user took to later.

Nothing here is language. The policy sees semantic ids of the items before the moment; every answer is one item, which a
`Catalogue` as the constraint of sampling sees to. A list of several items is an episode of several turns, whose answers
stand one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.ranking import discounts
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.roles import Prompt

Gain = Callable[[int, Collection[int]], float]


class SharedCodes:
    """A `Gain`: 1 of an item that is right, and something of one whose codes begin like those of an item that is.

    Right items are rare: under a policy that begins, most groups of answers have none, and say nothing. What items that
    begin alike have in common, their codes say (`residual_codes` puts like items under like beginnings).

    Args:
        credit: of 0, 1, 2, … leading codes shared, up to all but the last; what is missing counts 0.

    Raises:
        InvalidRun: a credit for every level, or one outside [0, 1].
    """

    def __init__(self, catalogue: Catalogue, credit: Sequence[float] = ()) -> None:
        levels = catalogue.ids.levels
        if len(credit) > levels or not all(0.0 <= one <= 1.0 for one in credit):
            raise InvalidRun(f"credit = {tuple(credit)} of {levels} levels.", remedy=f"at most {levels}, in [0, 1]")
        self._catalogue = catalogue
        self._worth = np.array([*credit, *[0.0] * (levels - len(credit)), 1.0])

    def __call__(self, item: int, later: Collection[int]) -> float:
        """Of the right item that it is likest to."""
        own = self._catalogue.tokens(item)
        right = np.stack([self._catalogue.tokens(other) for other in later])
        shared = np.logical_and.accumulate(right == own, axis=1).sum(1)
        return float(self._worth[shared].max())


class Recommending:
    """An `Environment`: `shown` items one after the other; the reward `ndcg` is the NDCG of their list.

    The prompt's row has `later`: the items that the user took to behind the moment, one at least; and may have `seen`:
    those that are not shown again. Such an answer takes no place in the list, and where nothing else was said the
    reward is None: what is not shown earns no judgement, good or bad. Nor need the policy learn what a filter does.

    Args:
        catalogue: of which answers are items.
        shown: items of a list. Of one alone the reward is its gain.
        gain: an item and those of `later` to what it is worth, in [0, 1], or a business's own; None: 1 of those alone.
            An item shown a second time is worth nothing.

    Raises:
        InvalidRun: `shown` below 1.
    """

    def __init__(self, catalogue: Catalogue, *, shown: int = 1, gain: Gain | None = None) -> None:
        if shown < 1:
            raise InvalidRun(f"shown = {shown}.", remedy="at least 1 item")
        self._catalogue, self._gain, self._worth = catalogue, gain or SharedCodes(catalogue), discounts(shown)
        self._items: list[int | None] = []
        self._turns = 0

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """The moment as it stands in the prompt; nothing is drawn."""
        self._later, self._items, self._turns = [int(item) for item in prompt.row["later"]], [], 0
        self._seen = frozenset(prompt.row.get("seen", ()))
        self._ideal = float(self._worth[: len(self._later)].sum())
        return prompt.ids

    def step(self, said: Said) -> Heard:
        """One more item; what is none of the catalogue is worth nothing and takes its place."""
        item, rank = self._catalogue.item(said.ids), len(self._items)
        self._turns += 1
        done, rewards = self._turns == len(self._worth), dict[str, float | None]()
        if item is None or item not in self._seen:
            gain = 0.0 if item is None or item in self._items else self._gain(item, self._later)
            rewards["ndcg"] = gain * float(self._worth[rank]) / self._ideal
            self._items.append(item)
        elif done and not self._items:
            rewards["ndcg"] = None
        return Heard(done=done, rewards=rewards, extra={"items": list(self._items)})

    def cut_off(self) -> Mapping[str, float | None]:
        """A list that ended early has what it has."""
        return {}

    def close(self) -> None:
        """Nothing is open."""
