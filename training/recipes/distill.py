"""Distillation: the student's next words towards a teacher's, over the whole vocabulary or its likeliest words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from bestiary.kernels.divergence import Distillation, TeacherHead, TopK
from bestiary.kernels.divergence_terms import Kind as Divergence
from bestiary.kernels.head import head_logits
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.vocab_parallel import VocabShard, localised
from bestiary.models import Decoder
from bestiary.training.control import Control
from bestiary.training.data.batch import batch
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind
from bestiary.training.data.tokens import IGNORED, NO_WORD, TeacherWords
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.base import Batch, LossSum
from bestiary.training.recipes.documents import (
    FORWARD,
    check_positive,
    model_inputs,
    on,
    router_term,
    scoring_pass,
    token_sum,
)
from bestiary.training.recipes.elsewhere import Answer, Elsewhere, Question
from bestiary.training.recipes.names import known

_LOGITS = 2**24  # of the teacher at once, where its likeliest words are looked for


class Distill:
    """Args:
    teacher: a model over the student's vocabulary, frozen here, or one in other processes; None: packs bring its
        likeliest words, and no teacher is in memory. They count as those of `top_k` do.
    loss: forward_kl, KL(t ‖ s); reverse_kl, KL(s ‖ t); jsd, the generalised Jensen–Shannon divergence of GKD with
        m = beta · t + (1 − beta) · s, as TRL's (OpenRLHF and NeMo-RL mix the two KLs instead).
    beta: of jsd, in (0, 1).
    temperature: of both sides; the divergence is not multiplied by its square, as in TRL and unlike Hinton et al.
    top_k: the teacher's likeliest words count one by one and all others as one, on both sides; None: all words.

    The divergence is taken where a token is trained: what the teacher says about prompts counts for nothing.

    Raises:
        InvalidRun: an unknown loss or a number outside its range.
    """

    name = "distill"
    unit: Literal["tokens", "sequences"] = "tokens"
    kinds: frozenset[Kind] = frozenset({"distillation", "chat", "completion", "text"})
    losses: ClassVar[tuple[str, ...]] = get_args(Divergence)
    slices: Literal[True] = True

    def __init__(
        self,
        teacher: Decoder | Elsewhere | None,
        loss: str = "forward_kl",
        beta: float = 0.5,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> None:
        self.kind = cast(Divergence, known(loss, self.losses, "loss.name"))
        check_positive(temperature, "loss.options.temperature")
        if not 0.0 < beta < 1.0:
            raise InvalidRun(
                f"loss.beta = {beta:g} is outside (0, 1).",
                remedy="loss.name = forward_kl is the limit 0, reverse_kl the limit 1",
            )
        if top_k is not None and top_k < 1:
            raise InvalidRun(f"loss.options.top_k = {top_k}.", remedy="at least 1, or leave it out for all words")
        if teacher is None and top_k is not None:
            raise InvalidRun(
                f"loss.options.top_k = {top_k} and no loss.teacher: the data's words count, as many as it has.",
                remedy="leave it out, or name a teacher",
            )
        self.elsewhere = teacher if isinstance(teacher, Elsewhere) else None
        here = None if isinstance(teacher, Elsewhere) else teacher
        self.teacher = None if here is None else here.requires_grad_(False).eval()
        self.beta, self.temperature, self.top_k = beta, temperature, top_k
        # The student reads the teacher's head after the teacher's pass: FSDP2 must leave it whole.
        for module in () if here is None else (here, here.lm_head):
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)

    def batch(self, pack: Pack) -> Batch:
        """Arguments of forward with `shift_labels`; without a teacher also words, log_prob (T, k), the next token's.

        Raises:
            InvalidRun: there is no teacher, and a trained token without words.
        """
        found: Batch = dict(batch(pack, shifted=True))
        return found | _stored(pack) if self.teacher is None and self.elsewhere is None else found

    def prepare(self, model: Decoder, batches: Sequence[Batch], control: Control, rank: int, ranks: int) -> None:
        """See `Prepares`: a teacher elsewhere is asked about all of them, and answers while the student computes."""
        if self.elsewhere is not None:
            for found, answer in zip(batches, self.elsewhere.ask([*map(self._question, batches)]), strict=True):
                found["answer"] = answer

    def count(self, batch: Batch) -> int:
        """Trained tokens."""
        return int((batch["shift_labels"] != IGNORED).sum())

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """Sum of the divergences.

        Raises:
            InvalidArgument: student and teacher have different vocabularies.
        """
        if self.teacher is model:
            raise InvalidRun("the teacher is the student itself.", remedy="another model in loss.teacher")
        given = model_inputs(batch, model, "shift_labels")
        asked = Distillation(self._said(model, batch, given), self.kind, self.beta)
        found = model(**given, num_items_in_batch=1, temperature=self.temperature, distillation=asked)
        return token_sum(found.loss + router_term(model, found, self.count(batch) - 1), batch)

    def _said(self, model: Decoder, batch: Batch, given: Batch) -> TeacherHead | TopK:
        """What the teacher says, or said when it was asked, about the tokens that are computed here."""
        labels, context = given["shift_labels"][0], given.get("context_slice")
        if self.elsewhere is not None:
            answer: Answer = batch.pop("answer", None) or self.elsewhere.ask([self._question(batch)])[0]
            return answer(labels.device)
        if self.teacher is None:
            dtype = at_least_fp32(next(model.parameters()).dtype)
            words, log_prob = on(batch["words"], labels.device).long(), on(batch["log_prob"], labels.device).to(dtype)
            if context is not None:
                words, log_prob = context.cut(words, 0), context.cut(log_prob, 0)
            return TopK(words, with_others(log_prob))
        with scoring_pass(self.teacher):
            said = self.teacher(**model_inputs(batch, self.teacher), return_teacher=True).teacher
            if self.top_k is None or not isinstance(said, TeacherHead):
                return cast(TeacherHead, said)
            labels = labels if context is None else context.cut(labels, 0)
            return likeliest(said, self.top_k, self.temperature, labels != IGNORED)

    def _question(self, batch: Batch) -> Question:
        counted = batch["shift_labels"][0] != IGNORED
        return Question({name: batch[name] for name in FORWARD}, counted, self.top_k, self.temperature)


def likeliest(teacher: TeacherHead, k: int, temperature: float, counted: torch.Tensor) -> TopK:
    """A teacher's k likeliest words at the positions that count, none (−1) elsewhere; see `with_others`.

    Args:
        counted: (N,) bool.
    Returns:
        words (N, k) int64, log_prob (N, k).
    Raises:
        InvalidRun: k is larger than the vocabulary.
    """
    size = teacher.weight.shape[0]  # of a split head too
    if k > size:
        raise InvalidRun(f"loss.options.top_k = {k} of {size} words.", remedy="fewer, or leave it out for all words")
    words = torch.full((len(counted), k), -1, dtype=torch.int64, device=counted.device)
    log_prob = torch.full((len(counted), k), -torch.inf, dtype=torch.float32, device=counted.device)
    log_prob = log_prob.to(torch.promote_types(teacher.hidden.dtype, torch.float32))
    with torch.no_grad():
        head = localised(teacher.hidden, teacher.weight, None, counted, None)
        for rows in counted.nonzero().squeeze(-1).split(max(1, _LOGITS // size)):
            logits = head_logits(head.hidden[rows], head.weight, divisor=teacher.divisor, softcap=teacher.softcap)
            words[rows], found = _first(logits.to(log_prob.dtype) / temperature, k, head.shard)
            log_prob[rows] = with_others(found) if k < size else found
    return TopK(words, log_prob)


def _first(logits: Tensor, k: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """The k likeliest words (R, k) and their log-probabilities, of logits over all words or this rank's share."""
    if shard is None:
        found = logits.log_softmax(-1).topk(k, dim=-1)
        return found.indices, found.values
    # Of each rank its own first ones: one all-gather of 2 k + 1 numbers a token in place of the logits.
    own = logits.topk(min(k, logits.shape[-1]), dim=-1)
    values, mass = shard.gather(own.values[None]), shard.gather(logits.logsumexp(-1)[None])
    words = shard.gather((own.indices + shard.start)[None])
    best = values.transpose(0, 1).flatten(1).topk(k, dim=-1)
    return words.transpose(0, 1).flatten(1).gather(1, best.indices), best.values - mass.logsumexp(0)[:, None]


def with_others(log_prob: Tensor) -> Tensor:
    """Log-probabilities (N, k) of some words, lowered where the others would keep less than a few roundings of 1.

    Below that 1 − Σ p is noise, and a reverse divergence from 0 would be infinite.
    """
    total = log_prob.logsumexp(-1, keepdim=True)
    spare = (math.log1p(-8 * torch.finfo(log_prob.dtype).eps) - total).clamp(max=0.0)
    return log_prob + spare.masked_fill(total == -torch.inf, 0.0)


def _stored(pack: Pack) -> Batch:
    """The words of a pack beside its `shift_labels`: at each position those of the next token."""
    trained = pack.labels != IGNORED
    lacking = trained if pack.teacher is None else trained & (pack.teacher.words == NO_WORD).all(1)
    if lacking.any():
        raise InvalidRun(
            f"{int(lacking.sum())} of {int(trained.sum())} trained tokens of a pack have no teacher's words.",
            remedy="loss.teacher, or sources of kind distillation whose rows hold teacher_ids",
        )
    known = TeacherWords.none(len(trained), 1) if pack.teacher is None else pack.teacher
    words, log_prob = torch.from_numpy(known.words), torch.from_numpy(known.log_probs)
    return {"words": words.roll(-1, 0), "log_prob": log_prob.roll(-1, 0)}
