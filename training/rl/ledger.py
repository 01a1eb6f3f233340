"""Which prompts were issued and not yet trained, by name: what makes that none is lost and none counted twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.training.rl.roles import Prompt


class LedgerBroken(BestiaryError):
    """A prompt that would be trained twice, or was trained without having been issued.

    Remedy: resume policy and controller from one resume point; give every prompt of a run a name of its own.
    """


@dataclass
class Ledger:
    """The controller's books.

    Attributes:
        issued: prompts taken from the data.   trained: of those, used up by optimiser steps.
        waiting: the others by name, the oldest first, whether in flight, answered or to be put.
    """

    issued: int = 0
    trained: int = 0
    waiting: dict[str, Prompt] = field(default_factory=dict)

    def issue(self, prompts: Sequence[Prompt]) -> None:
        """Take over prompts from the data.

        Raises:
            LedgerBroken: one of this name waits already.
        """
        for one in prompts:
            if one.prompt_id in self.waiting:
                raise LedgerBroken(
                    f"prompt {one.prompt_id} was issued twice.", remedy="names that are unique in the run"
                )
            self.waiting[one.prompt_id] = one
            self.issued += 1

    def oldest(self, count: int) -> list[str]:
        """Names of the first ones that wait; fewer where fewer do."""
        return [*islice(self.waiting, count)]

    def close(self, names: Iterable[str]) -> None:
        """These were trained.

        Raises:
            LedgerBroken: one of them does not wait.
        """
        for name in names:
            if self.waiting.pop(name, None) is None:
                raise LedgerBroken(f"prompt {name} was trained and did not wait.", remedy="see the sampler's groups")
            self.trained += 1

    def check(self, trained: Collection[str]) -> None:
        """Compare with what the policy says it trained on.

        Raises:
            LedgerBroken: names a prompt that waits and was trained, or says how many are missing or too many.
        """
        twice = [name for name in self.waiting if name in trained]
        if twice:
            raise LedgerBroken(
                f"prompt {twice[0]} waits to be trained and was ({len(twice)} such).",
                remedy="resume policy and controller from one resume point",
            )
        if len(trained) != self.trained:
            raise LedgerBroken(
                f"the policy has trained on {len(trained)} prompts, the controller has closed {self.trained}.",
                remedy="resume policy and controller from one resume point",
            )

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "waiting": [asdict(one) | {"ids": list(one.ids)} for one in self.waiting.values()],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Ledger:
        """What `as_json` gave."""
        prompts = [Prompt(**{**one, "ids": tuple(one["ids"])}) for one in stored["waiting"]]
        return cls(stored["issued"], stored["trained"], {one.prompt_id: one for one in prompts})
