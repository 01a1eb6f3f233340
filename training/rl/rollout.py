"""Rollouts: prompts as token ids in, sampled token ids with their log-probabilities out, whatever engine samples.

What an engine promises, so that one can take another's place:

* Tokens in, tokens out. Nothing is rendered, encoded or decoded on the way; the ids of an answer are those sampled.
* The distribution is softmax(logits / temperature) over the whole vocabulary and nothing else, or over the tokens that
  a `Constraint` allows. Those stand in the answer, so that training takes its log-probabilities over the same ones.
  Filters (top-p, top-k, min-p, penalties) are refused: what they leave depends on the weights, so the log-probabilities
  would be those of another distribution than the one that the tokens came from.
* An answer is a function of the weights, the prompt and its seed (`seed_of`). What else is in the call changes it only
  as far as rounding does, so a run that is resumed asks for the same answers again.
* Weights have a version, the number of optimiser steps behind them, and every answer says which one wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.randomness import key_of
from bestiary.training.errors import InvalidRun

Finish = Literal["stop", "length"]


class Constraint(Protocol):
    """Which tokens may come next in an answer, by the answer alone: a catalogue's trie, a grammar.

    `bestiary.training.data.catalogue.Catalogue` is one: answers are its items, by their semantic ids.
    """

    def allowed(self, beginning: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids that may follow what was sampled of an answer, one at least at its beginning; none: it is whole."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        max_tokens: of an answer, its stop token included.
        temperature: of the softmax, above 0.
        stop_ids: tokens that end an answer, any of them, and belong to it; none: every answer has `max_tokens`.
        n: answers to each prompt.
        constraint: of what may be sampled; an answer that it lets nothing follow ends there.
        seed: of the whole call; a caller that asks in every step gives every step another one (`seed_of(seed, step)`).
        top_p, top_k: there to be refused unless they filter nothing.

    Raises:
        InvalidRun: a value outside its range, or a filter.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    constraint: Constraint | None = None
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
        finish: "stop": its last token is one of `Sampling.stop_ids`, or the constraint lets nothing follow it;
            "length": it was cut off at `max_tokens`.
        version: of the weights that wrote all of it.
        allowed: (n, k) int32, the ids among which each was sampled, in ascending order, -1 for no further one; None:
            the whole vocabulary.
    """

    prompt: int
    ids: NDArray[np.int32]
    log_probs: NDArray[np.floating[Any]]
    finish: Finish
    version: int
    allowed: NDArray[np.int32] | None = None

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


class Remembered:
    """A constraint that is asked about each beginning once; what it allows, ascending.

    Beginnings have numbers, 0 that of no token at all, by which a longer one is found without reading it again.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._longer: dict[tuple[int, int], int] = {}
        self._known: dict[int, NDArray[np.int32]] = {}

    def __call__(self, beginning: NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids that may follow (n,) int32."""
        return self.at(reduce(self.number, beginning.tolist(), 0), beginning)

    def number(self, before: int, word: int) -> int:
        """Of a beginning, given that of all but its last token."""
        return self._longer.setdefault((before, word), len(self._longer) + 1)

    def at(self, number: int, beginning: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Ids that may follow the beginning of this number."""
        if number not in self._known:
            self._known[number] = np.unique(self._constraint.allowed(beginning.astype(np.int32))).astype(np.int32)
        return self._known[number]

    def along(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """(n, k): what each token of an answer may be, as `Rollout.allowed` says it."""
        numbers = accumulate(ids.tolist(), self.number, initial=0)
        return padded([self.at(number, ids[:place]) for place, number in zip(range(len(ids)), numbers, strict=False)])


class Tracks:
    """A constraint over answers that grow together, and what it allowed; answers alike so far are looked at once.

    Args:
        constraint: asked once for each beginning.   stop_ids: behind which an answer is not asked about.
    """

    def __init__(self, constraint: Constraint, stop_ids: Sequence[int]) -> None:
        self._asked, self._stops = Remembered(constraint), set(stop_ids)
        # Before each token, and behind the last: numbers of the answers' beginnings, and what may follow each of them.
        self._begun: list[NDArray[np.int64]] = []
        self._follows: list[dict[int, NDArray[np.int32]]] = []
        self._told: dict[int, NDArray[np.int32]] = {}

    def next(self, said: NDArray[np.int64]) -> NDArray[np.int64]:
        """(answers, n) ids so far → (answers, k), those that may follow, -1 for no further one."""
        begun = self._longer(said[:, -1]) if self._begun else np.zeros(len(said), np.int64)
        numbers, first, alike = np.unique(begun, return_index=True, return_inverse=True)
        whole = np.zeros(0, np.int32)
        found = [
            self._asked.at(number, said[row]) if self._goes_on(row, said[row]) else whole
            for number, row in zip(numbers.tolist(), first.tolist(), strict=True)
        ]
        self._begun.append(begun)
        self._follows.append(dict(zip(numbers.tolist(), found, strict=True)))
        return padded(found)[alike].astype(np.int64)

    def of(self, answer: int, length: int) -> NDArray[np.int32]:
        """(length, k): what the tokens of an answer were sampled among; of answers alike, one array."""
        number = int(self._begun[length - 1][answer])
        if number not in self._told:
            self._told[number] = padded([self._before(answer, place) for place in range(length)])
        return self._told[number]

    def ends(self) -> NDArray[np.bool_]:
        """(answers, n): whether nothing may follow each token."""
        steps = zip(self._follows[1:], self._begun[1:], strict=True)
        return np.array([[not len(follows[number]) for number in begun.tolist()] for follows, begun in steps]).T

    def _longer(self, last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the answers' beginnings with one more token each."""
        names, alike = np.unique(self._begun[-1] << 32 | last, return_inverse=True)
        return np.array([self._asked.number(*divmod(name, 1 << 32)) for name in names.tolist()])[alike]

    def _before(self, answer: int, place: int) -> NDArray[np.int32]:
        return self._follows[place][int(self._begun[place][answer])]

    def _goes_on(self, answer: int, said: NDArray[np.int64]) -> bool:
        return not self._begun or (len(self._before(answer, len(said) - 1)) > 0 and int(said[-1]) not in self._stops)


def remembered(constraint: Constraint | None) -> Remembered | None:
    """A constraint, to be asked about each beginning once; None: there is none."""
    return None if constraint is None else Remembered(constraint)


def padded(rows: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Ids of each row, behind them -1: (rows, the most in one, at least 1) int32."""
    made = np.full((len(rows), max([1, *map(len, rows)])), -1, np.int32)
    for row, ids in enumerate(rows):
        made[row, : len(ids)] = ids
    return made


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
