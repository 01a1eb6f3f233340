"""The reward of `make demo-rl` and `make demo-rl-real`: 1 for the right answer, whole and ended by itself, else 0.

A run imports this module in a process that does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from bestiary.training.rl.answer import Answer


def right(answers: Sequence[Answer]) -> list[float]:
    """Whether an answer is what the row has as `completion`, spaces around it aside."""
    return [
        float(one.finish == "stop" and (one.text or "").strip() == one.row["completion"].strip()) for one in answers
    ]
