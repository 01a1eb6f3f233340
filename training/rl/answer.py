"""What a reward function judges: one answer, as plain values.

Nothing is imported here but the standard library: a process that only judges starts in a moment.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, or conversation, of the policy.

    Attributes:
        prompt_id, sample: whose it is, and its number in the group.
        prompt: text before the first answer; None: the run has no tokenizer.
        text: of the last answer without its stop token; may be empty; None: the run has no tokenizer.
        turns: texts of all answers, the last one `text`; empty without a tokenizer.
        prompt_ids: before the first answer.   ids: of the last answer, its stop token included; may be empty.
        row: the prompt's columns in the data.
        finish: "stop", or "length": it was cut off.
        extra: what the environment said, and `turns`, their number.
    """

    prompt_id: str
    sample: int
    prompt: str | None
    text: str | None
    turns: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    row: Mapping[str, Any]
    finish: str
    extra: Mapping[str, Any]


RewardFunction = Callable[[Sequence[Answer]], Any]
"""`def reward(answers: Sequence[Answer]) -> Sequence[float | None]`, or the same with `async def`: a number for each,
in their order; None where it does not judge. It may be asked about an answer again, and has to say the same then."""


def judging(function: RewardFunction) -> Callable[[Any], list[float | None]]:
    """A reward function as what a process of its own calls: answers as JSON in, numbers out.

    Raises (when called):
        TypeError, ValueError: it returned something else than a number or None for each answer.
    """
    runner = asyncio.Runner()

    def judge(payload: Any) -> list[float | None]:
        answers = []
        for one in payload:
            fields: dict[str, Any] = dict(one)
            for name in ("turns", "prompt_ids", "ids"):
                fields[name] = tuple(fields[name])
            answers.append(Answer(**fields))
        found = function(answers)
        if inspect.isawaitable(found):
            found = runner.run(_awaited(found))
        return numbers(found, len(answers))

    return judge


def numbers(found: Any, count: int) -> list[float | None]:
    """What a judge returned, as so many numbers.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(found, Mapping) or not hasattr(found, "__iter__"):
        raise TypeError(f"returned {type(found).__name__} and no list of numbers")
    given = list(found)
    if any(isinstance(value, str | bytes) for value in given):
        raise TypeError("returned text in place of a number")
    values = [None if value is None else float(value) for value in given]
    if len(values) != count:
        raise ValueError(f"returned {len(values)} rewards for {count} answers")
    return values


async def _awaited(found: Any) -> Any:
    return await found
