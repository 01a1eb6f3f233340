"""What the run under fire is about: an environment that asks twice, and a reward for even ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bestiary.training.rl.answer import Answer
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.roles import Prompt

ASKED_AGAIN = 5


class Twice:
    """An `Environment` that hears an answer, asks again, and has heard enough."""

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """The prompt as it is."""
        return prompt.ids

    def step(self, said: Said) -> Heard:
        """One word after the first answer."""
        return Heard(ids=(ASKED_AGAIN,), done=said.turn > 0)

    def cut_off(self) -> Mapping[str, float | None]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing."""


def even(answers: Sequence[Answer]) -> list[float]:
    """The share of even ids of the last turn."""
    return [sum(word % 2 == 0 for word in one.ids) / max(1, len(one.ids)) for one in answers]
