"""A teacher in other processes, as distillation asks it: a question for each pack, those of a step all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bestiary.kernels.divergence import TeacherHead, TopK


@dataclass(frozen=True)
class Question:
    """What a teacher is asked about one pack.

    Attributes:
        given: arguments of forward by name, on the CPU.
        counted: (T,) bool, the places whose next words are asked about.
        top_k: its likeliest words and all others as one; None: all of them.
        temperature: of its likeliest words.
    """

    given: Mapping[str, Any]
    counted: Tensor
    top_k: int | None
    temperature: float


Answer = Callable[[torch.device], TeacherHead | TopK]


@runtime_checkable
class Elsewhere(Protocol):
    """A teacher that is asked, and not called."""

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Begin to answer; returns at once. An answer is waited for where it is called, best in this order."""
        ...
