"""What the process of a teacher hosts: a model that is asked about packs, and what of its answers travels."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from bestiary.bridges.hub import split_revision
from bestiary.models import AutoDecoder, Decoder
from bestiary.models.layers.head import Head
from bestiary.training.contents import NOTHING, Contents, refuse_others
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.distill import likeliest
from bestiary.training.recipes.documents import model_inputs, on, scoring_pass
from bestiary.training.recipes.elsewhere import Question
from bestiary.training.rl.cluster import enter

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TeacherFacts:
    """Of a teacher's head, with which a student makes its distribution of its last hidden states.

    Attributes:
        divisor, softcap: of its logits, as `TeacherHead` has them.
    """

    divisor: float
    softcap: float | None


class LocalTeacher:
    """A teacher in this process.

    Args:
        model: that only computes, whole.
    Raises:
        InvalidRun: one without a vocabulary, a reward model.
    """

    def __init__(self, model: Decoder) -> None:
        if not isinstance(model.lm_head, Head):
            raise InvalidRun(
                f"a teacher with a head of class {type(model.lm_head).__name__}, which has no vocabulary.",
                remedy="a language model in loss.teacher",
            )
        self.model, self._head = model, model.lm_head
        self._computing = threading.Lock()

    @property
    def facts(self) -> TeacherFacts:
        """Of its head."""
        return TeacherFacts(self._head.divisor, self._head.softcap)

    def head(self) -> Tensors:
        """weight (V, H), which a student needs once where it asks for all words."""
        return {"weight": self._head.weight.detach()}

    def said(self, question: Question) -> Tensors:
        """What it says at the n places that count.

        All words: hidden (n, H), of which the student makes their distribution with the head: H numbers a place on
        their way and not V. Its likeliest: words (n, k) int32 and log_prob (n, k), see `recipes.distill.likeliest`.

        Raises:
            InvalidRun: more words than it knows.
        """
        counted = on(question.counted, next(self.model.parameters()).device)
        with self._computing, scoring_pass(self.model):
            said = self.model(**model_inputs(dict(question.given), self.model), return_teacher=True).teacher
            if question.top_k is None:
                return {"hidden": said.hidden[counted]}
            found = likeliest(said, question.top_k, question.temperature, counted)
            return {"words": found.words[counted].int(), "log_prob": found.log_prob[counted]}


def teacher_process(
    src: str, dtype: str | None, deterministic: bool, folder: str, contents: Contents = NOTHING
) -> LocalTeacher:
    """In a process of its own: the teacher of a checkpoint.

    Args:
        dtype: that it computes in; None: the checkpoint's.   folder: that `src` may count from.
        contents: of it as the run began, as `loss.teacher`.
    Raises:
        CheckpointRefused: another one lies there by now.
    """
    enter(folder)
    refuse_others({"loss.teacher": src}, contents)
    torch.use_deterministic_algorithms(deterministic)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, revision = split_revision(src)
    model = AutoDecoder.from_pretrained(name, revision=revision, dtype=dtype, device=device)
    return LocalTeacher(model.requires_grad_(False).eval())
