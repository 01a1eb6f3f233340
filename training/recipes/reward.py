"""Reward models: a score for each document, from the decoder's last hidden state of it."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.models.config import HeadKind
from bestiary.training.data.batch import document_values
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind
from bestiary.training.errors import InvalidRun
from bestiary.training.losses import pairwise, squared
from bestiary.training.recipes.base import Batch, LossSum
from bestiary.training.recipes.documents import document_batch, model_inputs, on, router_term
from bestiary.training.recipes.names import known


class Reward:
    """Args:
    loss: "pairwise", Bradley–Terry on preference pairs; "squared", distance from the score that data gives.
    margin: that the chosen answer's score is asked to be ahead by, in packs whose pairs bring no margins of their own.
    centring: weight of (s_c + s_r)², which holds scores near 0; 0: none.

    The model has a score head of one label. Scores are read at the last token of each document.

    Raises:
        InvalidRun: an unknown loss, or a number that it does not read or that is negative.
    """

    name = "reward"
    unit: Literal["tokens", "sequences"] = "sequences"
    losses: ClassVar[tuple[str, ...]] = ("pairwise", "squared")

    def __init__(self, loss: str = "pairwise", margin: float = 0.0, centring: float = 0.0) -> None:
        known(loss, self.losses, "loss.name")
        self.paired, self.margin, self.centring = loss == "pairwise", margin, centring
        self.kinds: frozenset[Kind] = frozenset({"preference" if self.paired else "reward"})
        for option, value in (("margin", margin), ("centring", centring)):
            if value < 0 or (value and not self.paired):
                raise InvalidRun(
                    f"loss.options.{option} = {value:g} with loss.name = {loss}.",
                    remedy="a number from 0 on, of loss.name = pairwise",
                )

    def batch(self, pack: Pack) -> Batch:
        """`document_batch` with `counts` (pairs or documents,) bool, `margin` of pairs, `wanted` of scored data.

        Raises:
            InvalidRun: the pack holds no pairs.   SampleRefused: a document without a score, or some margins missing.
        """
        found = document_batch(pack)
        found["counts"] = found["targets"] > 0
        if not self.paired:
            return found | {"wanted": document_values(pack)}
        if pack.documents % 2:
            raise InvalidRun(
                f"a pack of {pack.documents} documents under {self.name}, which takes them in pairs.",
                remedy="sources of kind 'preference', or loss.name = squared for scored answers",
            )
        found["counts"] = found["counts"].view(-1, 2).all(1)
        given = (
            torch.full((pack.documents,), self.margin, dtype=torch.float64)
            if pack.values is None
            else document_values(pack)
        )
        found["margin"] = given.view(-1, 2)[:, 0]
        return found

    def count(self, batch: Batch) -> int:
        """Pairs, or scored documents."""
        return int(batch["counts"].sum())

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """Sum over pairs or documents.

        Metrics: accuracy, margin, score_chosen, score_rejected of pairs; score of scored documents.

        Raises:
            InvalidRun: the model has no score head, or one of several labels.
        """
        found = model(**self._checked(model, batch))
        scores = found.scores[: int(batch["documents"]), 0]  # padding is scored as one more document
        routers = router_term(model, found, self.count(batch))
        counts = on(batch["counts"], scores.device)

        def over(column: Tensor) -> Tensor:
            return torch.where(counts, column, 0.0).sum()

        if not self.paired:
            total = over(squared(scores, on(batch["wanted"], scores.device))) + routers
            return LossSum(total, {"score": over(scores.detach())})
        better, worse = scores.view(-1, 2).unbind(1)
        total = (
            over(pairwise(better, worse, on(batch["margin"], scores.device).to(scores.dtype), self.centring)) + routers
        )
        better, worse = better.detach(), worse.detach()
        return LossSum(
            total,
            {
                "accuracy": over((better > worse).to(better.dtype)),
                "margin": over(better - worse),
                "score_chosen": over(better),
                "score_rejected": over(worse),
            },
        )

    def _checked(self, model: Decoder, batch: Batch) -> Batch:
        config = model.decoder_config
        if config.head is not HeadKind.SCORE or config.num_labels != 1:
            raise InvalidRun(
                f"a reward model with head = {config.head.value} and num_labels = {config.num_labels}.",
                remedy="head = score and num_labels = 1 in the model's config",
            )
        return model_inputs(batch, model)
