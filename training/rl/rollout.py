"""Rollouts: prompts as token ids in, sampled token ids with their log-probabilities out, whatever engine samples.

What an engine promises, so that one can take another's place:

* Tokens in, tokens out. Nothing is rendered, encoded or decoded on the way; the ids of an answer are those sampled.
* The distribution is softmax(logits / temperature) over the whole vocabulary and nothing else. Filters (top-p, top-k,
  min-p, penalties) are refused: under them the log-probabilities would be those of another distribution than the one
  that the tokens came from.
* An answer is a function of the weights, the prompt and its seed (`seed_of`). What else is in the call changes it only
  as far as rounding does, so a run that is resumed asks for the same answers again.
* Weights have a version, the number of optimiser steps behind them, and every answer says which one wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.randomness import key_of
from bestiary.training.errors import InvalidRun

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        max_tokens: of an answer, its stop token included.
        temperature: of the softmax, above 0.
        stop_ids: tokens that end an answer, any of them, and belong to it; none: every answer has `max_tokens`.
        n: answers to each prompt.
        seed: of the whole call; a caller that asks in every step gives every step another one (`seed_of(seed, step)`).
        top_p, top_k: there to be refused unless they filter nothing.

    Raises:
        InvalidRun: a value outside its range, or a filter.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        for name, filters in (("top_p", self.top_p != 1.0), ("top_k", self.top_k > 0)):
            if filters:
                raise InvalidRun(
                    f"{name} = {getattr(self, name)} in sampling for training: the tokens would come from another "
                    "distribution than the one whose log-probabilities are trained on.",
                    remedy=f"leave {name} out; temperature alone shapes the distribution",
                )
        for name, count in (("max_tokens", self.max_tokens), ("n", self.n)):
            if count < 1:
                raise InvalidRun(f"{name} = {count}.", remedy="at least 1")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InvalidRun(
                f"temperature = {self.temperature}.", remedy="a number above 0; greedy answers have no log-probability"
            )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer.

    Attributes:
        prompt: place of its prompt in the call.
        ids: (n,) int32, what was sampled, the stop token included; at least one.
        log_probs: (n,) float32, or float64 where the engine computes in it: of each of those under the distribution it
            was sampled from.
        finish: "stop": its last token is one of `Sampling.stop_ids`; "length": it was cut off at `max_tokens`.
        version: of the weights that wrote all of it.
    """

    prompt: int
    ids: NDArray[np.int32]
    log_probs: NDArray[np.floating[Any]]
    finish: Finish
    version: int

    def __len__(self) -> int:
        return len(self.ids)


class RolloutEngine(Protocol):
    """What samples answers.

    Attributes:
        version: of the weights that it samples with: the number of optimiser steps behind them. Whoever puts weights
            into the engine sets it; an engine that shares its weights with the trainer is told after each step.
    """

    version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """`sampling.n` answers to every prompt.

        Args:
            prompts: token ids, at least one each.
            keys: names of the prompts (numbers or texts), of which seeds are made; None: their places in the call.
                Answer `a` to the prompt named `key` is drawn with `seed_of(sampling.seed, key, a)`.
        Returns:
            Those of the first prompt, then those of the second, …: answer `a` to prompt `p` at `p * n + a`.
        Raises:
            InvalidRun: an empty prompt, or one that leaves no room for an answer in the context; names its place.
        """
        ...

    def close(self) -> None:
        """Let go of everything; to be called once."""
        ...


def seed_of(*parts: object) -> int:
    """A seed in [0, 2⁶³) that depends on every part and its place: of numbers, texts and tuples of them."""
    return int(key_of(*parts)[0] >> np.uint64(1))


def check_prompts(prompts: Sequence[Sequence[int]], sampling: Sampling, *, context: int) -> None:
    """Refuse prompts that no engine can answer.

    Args:
        context: positions that the model has.
    Raises:
        InvalidRun: names the first one.
    """
    for place, prompt in enumerate(prompts):
        if not len(prompt):
            raise InvalidRun(f"prompt {place} of {len(prompts)} is empty.", remedy="a prompt has at least one token")
        if len(prompt) + sampling.max_tokens > context:
            raise InvalidRun(
                f"prompt {place} of {len(prompts)} has {len(prompt)} tokens; with max_tokens = {sampling.max_tokens} "
                f"that is more than the {context} positions of the model.",
                remedy="fewer max_tokens, or leave such prompts out (data.overflow=drop and data.pack_length)",
            )
