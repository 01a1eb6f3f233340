"""One episode as far as it has come, and the answers to one prompt: what `Episodes` keeps books of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bestiary.training.rl.environments import Environment, Heard, Said
from bestiary.training.rl.prompt import Prompt
from bestiary.training.rl.records import Trajectory
from bestiary.training.rl.rollout import Finish, Rollout, Sampling


class Episode:
    """One answer, or conversation, as far as it has come."""

    def __init__(self, prompt: Prompt, sample: int, sampling: Sampling, order: int) -> None:
        self.prompt, self.sample, self.sampling, self.order = prompt, sample, sampling, order
        self.begin_again()

    def begin_again(self) -> None:
        """As if nothing had been played."""
        self.ids = list(self.prompt.ids)
        self.environment: Environment | None = None
        self.trajectory: Trajectory | None = None
        self.turns = 0
        self.finish: Finish = "length"
        self.sample_s = self.environment_s = 0.0
        self._said: list[tuple[int, Rollout]] = []
        self._rewards: dict[str, float | None] = {}
        self._extra: dict[str, Any] = {}

    @property
    def answer_name(self) -> tuple[int, str, int, int]:
        """Of the next answer: what its seed is made of."""
        return self.sampling.seed, self.prompt.prompt_id, self.sample, self.turns

    def say(self, rollout: Rollout, seconds: float) -> Said:
        """Append an answer."""
        words = tuple(rollout.ids.tolist())
        self._said.append((len(self.ids), rollout))
        self.ids += words
        self.finish, self.sample_s = rollout.finish, self.sample_s + seconds
        self.turns += 1
        return Said(ids=words, finish=rollout.finish, turn=self.turns - 1)

    def hear(self, heard: Heard) -> None:
        """Append what follows an answer, or stand at what the first one is sampled behind."""
        self.ids = [*(self.ids if self.turns else ()), *heard.ids]
        self._rewards = added(self._rewards, heard.rewards)
        self._extra |= heard.extra

    def fail(self, told: str) -> None:
        """Keep no reward: it was not played to its end."""
        self._rewards = {}
        self._extra["failed"] = told

    def close(self) -> None:
        """Let go of its environment; may be called again."""
        environment, self.environment = self.environment, None
        if environment is not None:
            environment.close()

    def end(self, finish: Finish) -> None:
        """Make its record."""
        sampled = np.zeros(len(self.ids), np.bool_)
        kinds = [one.log_probs.dtype for _, one in self._said]
        log_probs = np.zeros(len(self.ids), np.result_type(np.float32, *kinds))
        for start, one in self._said:
            sampled[start : start + len(one)] = True
            log_probs[start : start + len(one)] = one.log_probs
        allowed = None
        if any(one.allowed is not None for _, one in self._said):
            width = max(one.allowed.shape[1] for _, one in self._said if one.allowed is not None)
            allowed = np.full((len(self.ids), width), -1, np.int32)
            for start, one in self._said:
                if one.allowed is not None:
                    allowed[start : start + len(one), : one.allowed.shape[1]] = one.allowed
        told = {
            "row": dict(self.prompt.row),
            "turns": self.turns,
            "sample_s": self.sample_s,
            "environment_s": self.environment_s,
        }
        self.trajectory = Trajectory(
            prompt_id=self.prompt.prompt_id,
            group_id=self.prompt.prompt_id,
            sample=self.sample,
            ids=np.array(self.ids, np.int32),
            sampled=sampled,
            rollout_log_probs=log_probs,
            temperature=self.sampling.temperature,
            version=min((one.version for _, one in self._said), default=0),
            finish=finish,
            rewards=self._rewards,
            extra=self._extra | told,
            allowed=allowed,
        )


@dataclass(eq=False)
class Group:
    """Answers to one prompt.

    Attributes:
        ended: its place among the groups that are complete; None: it is not yet.
    """

    episodes: list[Episode]
    ended: int | None = None


def added(rewards: Mapping[str, float | None], more: Mapping[str, float | None]) -> dict[str, float | None]:
    """Sums by name; None with anything is None.

    Raises:
        ValueError: a reward that is no finite number.
    """
    made = dict(rewards)
    for name, value in more.items():
        before = made.get(name, 0.0)
        made[name] = None if value is None or before is None else before + float(value)
        if value is not None and not math.isfinite(float(value)):
            raise ValueError(f"the reward {name} is {value}")
    return made
