"""A teacher in processes of its own, seen from the student that learns from it."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bestiary.kernels.divergence import TeacherHead, TopK
from bestiary.training.errors import RoleLost
from bestiary.training.recipes.documents import on
from bestiary.training.recipes.elsewhere import Answer, Question
from bestiary.training.rl.buckets import BUCKET_BYTES, Bucket, tensors_of
from bestiary.training.rl.teacher import TeacherFacts, Tensors

if TYPE_CHECKING:
    from bestiary.training.rl.groups import Group

LOGGER = logging.getLogger(__name__)
AHEAD = 2  # questions that a process has at a time: one that it answers, one whose answer is fetched
_RESTARTS = 3  # for one answer
T = TypeVar("T")


@dataclass(eq=False)
class _Asked:
    """A question, and whom it was put to under which number."""

    question: Question | None
    member: int = 0
    ticket: int = -1
    reference: Any = None


class RemoteTeacher:
    """A teacher elsewhere (`recipes.elsewhere.Elsewhere`), over a group of `TeacherWorker`, each with the whole model.

    Packs take turns at the processes; a pack is never divided, so an answer is the one that the student's own process
    would have given. What was asked of a process that died is asked again of the one that replaces it.

    Args:
        group: starts it, or returns it.   bucket_bytes: of an answer that are on their way at a time.
    """

    def __init__(self, group: Callable[[], Group], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._waiting, self._sent = deque[_Asked](), list[_Asked]()
        self._turns, self._tickets = itertools.count(), itertools.count()
        self._weight: Tensor | None = None

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """See `Elsewhere`.

        Raises:
            RoleLost: processes died more often than is borne.
        """
        asked = [_Asked(one) for one in questions]
        self._waiting.extend(asked)
        self._kept(self._send)
        return [self._answer(one) for one in asked]

    def _answer(self, asked: _Asked) -> Answer:
        def answer(device: torch.device) -> TeacherHead | TopK:
            question = asked.question
            assert question is not None
            if question.top_k is None:
                weight, facts = self._head(device), self._facts()
            found = {name: on(tensor, device) for name, tensor in self._kept(lambda: self._fetched(asked)).items()}
            counted = on(question.counted, device)
            if question.top_k is None:
                hidden = _spread(found["hidden"], counted, 0.0)
                return TeacherHead(hidden, weight, None, facts.divisor, facts.softcap)
            words = _spread(found["words"].long(), counted, -1)
            return TopK(words, _spread(found["log_prob"], counted, -torch.inf))

        return answer

    def _facts(self) -> TeacherFacts:
        found: TeacherFacts = self._kept(lambda: self._group().described[0])
        return found

    def _head(self, device: torch.device) -> Tensor:
        """The weight of its head, fetched once: it does not train."""
        if self._weight is None:
            head = _Asked(None)
            self._weight = on(self._kept(lambda: self._fetched(head))["weight"], device)
        return self._weight

    # ------------------------------------------------------------------ questions on their way

    def _send(self) -> None:
        """As many as the processes should have."""
        while self._waiting and len(self._sent) < AHEAD * self._group().size:
            self._put(self._waiting[0])
            self._sent.append(self._waiting.popleft())

    def _put(self, asked: _Asked) -> None:
        group = self._group()
        asked.member, asked.ticket = next(self._turns) % group.size, next(self._tickets)
        asked.reference = group.members.ask(asked.member, "say", asked.ticket, asked.question, self._bucket_bytes)

    def _fetched(self, asked: _Asked) -> Tensors:
        self._send()
        if asked.reference is None:  # before its turn
            self._put(asked)
            if asked in self._waiting:
                self._waiting.remove(asked)
            self._sent.append(asked)
        members = self._group().members
        members.wait([asked.reference], members=[asked.member])
        found = dict(tensors_of(self._parts(asked)))
        self._sent.remove(asked)
        return found

    def _parts(self, asked: _Asked) -> Iterator[Bucket]:
        members = self._group().members
        while (part := members.answer(asked.member, "part", asked.ticket)) is not None:
            yield part

    def _kept(self, work: Callable[[], T]) -> T:
        """What it returns, made again with new processes where some died."""
        for deaths in range(_RESTARTS + 1):
            try:
                return work()
            except RoleLost as lost:
                if lost.role != "teacher" or deaths == _RESTARTS:
                    raise
                LOGGER.warning("%s; restarting it", lost.what)
                self._group().restart()
                self._again()
        raise AssertionError("the last death was raised")

    def _again(self) -> None:
        """What is on its way waits to be asked anew; those who live let go of it."""
        members = self._group().members
        for member in range(len(members)):
            members.tell(member, "forget", next(self._tickets))
        for one in reversed(self._sent):
            one.reference = None
            if one.question is not None:
                self._waiting.appendleft(one)
        self._sent.clear()


def _spread(rows: Tensor, counted: Tensor, filling: float) -> Tensor:
    """Rows of the places that count, among all places."""
    made = rows.new_full((len(counted), *rows.shape[1:]), filling)
    made[counted] = rows
    return made
