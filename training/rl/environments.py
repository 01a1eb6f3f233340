"""What answers the policy: the world of an episode, in token ids on both sides.

An environment says what stands before the first answer, hears every answer, and says what follows it. Nothing that the
policy sampled comes back: what an environment returns is appended behind it, so no id is ever encoded a second time.
Nothing here knows of language. An environment that speaks one holds a tokenizer (`tool_environment`); one that does not
has ids of its own (a recommender's items).

One object plays one episode. Episodes run in threads: what their environments share is for the factory to guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bestiary.training.rl.prompt import Prompt
from bestiary.training.rl.rollout import Finish


@dataclass(frozen=True, kw_only=True)
class Said:
    """One answer of the policy.

    Attributes:
        ids: what was sampled, the stop token included.
        finish: "length": cut off by `max_tokens` or by the end of the context.
        turn: its number in the episode, from 0.
    """

    ids: tuple[int, ...]
    finish: Finish
    turn: int


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What an environment says to an answer.

    Attributes:
        ids: appended behind the answer; the next one is sampled behind them. Ignored once it is done.
        done: the episode is over.
        rewards: by name. Of several steps those of one name are added; a None anywhere makes the sum None.
        extra: JSON values, put into the trajectory's; a later step replaces an earlier one's of the same name.
        finish: of the whole episode, where the environment knows better than its last answer: one that was cut off at
            the length all answers have is no truncation.
    """

    ids: Sequence[int] = ()
    done: bool = False
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    finish: Finish | None = None


class Environment(Protocol):
    """The world of one episode.

    Any method may take its time and may raise: an error ends its episode, which then has no rewards and trains nothing,
    and more of them than the run allows end the run. `RoleLost` says that the process behind it died: its episode is
    begun again.
    """

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """Begin; what the first answer is sampled behind, usually `prompt.ids`.

        Args:
            seed: a function of the prompt's name and the run's seed, the same for all answers of a group: they are
                compared with one another, so they begin alike.
        """
        ...

    def step(self, said: Said) -> Heard:
        """Hear an answer, and say what follows."""
        ...

    def cut_off(self) -> Mapping[str, float | None]:
        """The episode ends behind what was heard last: no room for another answer, or no turn left. Further rewards."""
        ...

    def close(self) -> None:
        """Let go of everything; called once, also after an error."""
        ...


EnvironmentFactory = Callable[[], Environment]
