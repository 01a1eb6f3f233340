"""A recommender's world: a moment in what a user did, items that the policy shows, and what the user took to later.

Nothing here is language. The policy sees semantic ids of the items before the moment, and an answer is a list of items,
one behind the other; that it is one, and names no item twice, `Lists` as the constraint of sampling sees to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.ranking import discounts, ideal_gain
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.roles import Prompt

Gain = Callable[[int, Mapping[int, float]], float]
"""What showing an item is worth, given the items that the user took to later and what each of them is worth."""


class Lists:
    """A `Constraint`: answers are lists of different items of a catalogue.

    Args:
        items: of a list.

    Raises:
        InvalidRun: fewer than 1, or more than the catalogue has.
    """

    def __init__(self, catalogue: Catalogue, items: int) -> None:
        if not 1 <= items <= len(catalogue):
            raise InvalidRun(f"lists of {items} items.", remedy=f"1 to {len(catalogue)}, all of the catalogue")
        self._catalogue, self._items = catalogue, items

    def allowed(self, beginning: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """See `rollout.Constraint`: the next code of an item that is not in the list yet."""
        levels = self._catalogue.ids.levels
        whole, begun = divmod(len(beginning), levels)
        if whole >= self._items:
            return np.zeros(0, np.int32)
        words = np.asarray(beginning, np.int32)
        listed, tail = words[: whole * levels].reshape(whole, levels), words[whole * levels :]
        found = self._catalogue.allowed(tail)
        alike = listed[(listed[:, :begun] == tail).all(1), begun]
        # A code goes when all items behind it are in the list.
        spent = [
            code
            for code, times in zip(*np.unique(alike, return_counts=True), strict=True)
            if times >= self._catalogue.count([*tail.tolist(), int(code)])
        ]
        return found[~np.isin(found, spent)] if spent else found


class Recommending:
    """An `Environment`: the policy writes a list of items; the reward `ndcg` is the NDCG of what is shown of it.

    The prompt's row has `later`: the items that the user took to behind the moment, one at least; and may have `worth`:
    what each of them is worth, above 0 (a rating, a price), else 1; and `seen`: items that are not shown again. Such an
    item takes no place in the list, and where nothing else was said the reward is None: what is not shown earns no
    judgement.

    Args:
        catalogue: whose items they are.
        shown: items of a list, in one answer or several. Of one alone the reward is its gain.
        gain: what an item is worth; None: what `worth` says of those of `later`, and nothing of others. An item shown
            a second time is worth nothing.

    Raises:
        InvalidRun: `shown` below 1.
    """

    def __init__(self, catalogue: Catalogue, *, shown: int = 1, gain: Gain | None = None) -> None:
        if shown < 1:
            raise InvalidRun(f"shown = {shown}.", remedy="at least 1 item")
        self._catalogue, self._gain = catalogue, gain
        self._worth = discounts(shown)
        self._items: list[int | None] = []
        self._said = 0

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """The moment as it stands in the prompt; nothing is drawn.

        Raises:
            InvalidRun: `later` without an item, or `worth` that is not one number above 0 for each.
        """
        self._later = _worths(prompt)
        self._seen = frozenset(prompt.row.get("seen", ()))
        self._items, self._said = [], 0
        self._ideal = ideal_gain(self._later.values(), self._worth)
        return prompt.ids

    def step(self, said: Said) -> Heard:
        """Further items; what is none of the catalogue is worth nothing and takes its place."""
        levels, reward = self._catalogue.ids.levels, 0.0
        named = [said.ids[start : start + levels] for start in range(0, len(said.ids), levels)]
        for ids in named[: len(self._worth) - self._said]:
            item = self._catalogue.item(ids)
            self._said += 1
            if item is not None and item in self._seen:
                continue
            reward += self._worth_of(item) * float(self._worth[len(self._items)]) / self._ideal
            self._items.append(item)
        done = self._said == len(self._worth)
        judged = reward if self._items or not done else None
        return Heard(done=done, rewards={"ndcg": judged}, extra={"items": list(self._items)})

    def _worth_of(self, item: int | None) -> float:
        if item is None or item in self._items:
            return 0.0
        return self._later.get(item, 0.0) if self._gain is None else self._gain(item, self._later)

    def cut_off(self) -> Mapping[str, float | None]:
        """A list that ended early has what it has."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def _worths(prompt: Prompt) -> dict[int, float]:
    """What each item of `later` is worth."""
    later = [int(item) for item in prompt.row["later"]]
    worth = [float(one) for one in prompt.row.get("worth", [1.0] * len(later))]
    if not later or len(worth) != len(later) or not all(0.0 < one < np.inf for one in worth):
        raise InvalidRun(
            f"{prompt.prompt_id}: later has {len(later)} items, worth = {worth}.",
            remedy="one item at least, and a number above 0 for each",
        )
    return dict(zip(later, worth, strict=True))
