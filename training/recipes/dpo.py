"""Preference pairs: DPO and its relatives, with a reference that is live, stored, or the policy without adapters."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind
from bestiary.training.errors import InvalidRun
from bestiary.training.losses_preference import PAIRED, Pairs
from bestiary.training.recipes.base import Batch, LossSum
from bestiary.training.recipes.documents import (
    check_positive,
    document_batch,
    document_sums,
    model_inputs,
    on,
    router_term,
)
from bestiary.training.recipes.names import known
from bestiary.training.recipes.reference import Reference


class DPO:
    """Args:
    reference: `Live`, `AdaptersOff` or `Stored`. At the first step policy and reference agree bit by bit (without
        dropout), so that `sigmoid` gives exactly ln 2 a pair.
    loss: sigmoid, ipo, hinge, robust, sigmoid_norm, apo_zero, apo_down; see `losses_preference`.
    beta: how dear distance from the reference is.
    label_smoothing: share of swapped pairs that `robust` assumes, below ½.

    Pairs of which an answer has no trained token count for nothing.

    Raises:
        InvalidRun: an unknown loss, a number outside its range, or one that the loss does not read.
    """

    name = "dpo"
    unit: Literal["tokens", "sequences"] = "sequences"
    kinds: frozenset[Kind] = frozenset({"preference"})
    losses: ClassVar[tuple[str, ...]] = tuple(PAIRED)
    slices: Literal[True] = True

    def __init__(
        self, reference: Reference, loss: str = "sigmoid", beta: float = 0.1, label_smoothing: float | None = None
    ) -> None:
        self.reference, self._loss, self.beta = reference, PAIRED[known(loss, PAIRED, "loss.name")], beta
        check_positive(beta, "loss.beta")
        if label_smoothing is not None and loss != "robust":
            raise InvalidRun(
                f"loss.options.label_smoothing = {label_smoothing:g}, which {loss} does not read.",
                remedy="loss.name = robust, or leave it out",
            )
        if label_smoothing is not None and not 0.0 <= label_smoothing < 0.5:
            raise InvalidRun(f"loss.options.label_smoothing = {label_smoothing:g}.", remedy="a share in [0, ½)")
        self._options = {} if label_smoothing is None else {"label_smoothing": label_smoothing}

    def batch(self, pack: Pack) -> Batch:
        """`document_batch`, chosen and rejected one after the other, and `counts` (pairs,) bool.

        Raises:
            InvalidRun: the pack does not hold pairs.
        """
        found = document_batch(pack)
        if pack.documents % 2:
            raise InvalidRun(
                f"a pack of {pack.documents} documents under {self.name}, which takes them in pairs.",
                remedy="sources of kind 'preference'",
            )
        found["counts"] = (found["targets"].view(-1, 2) > 0).all(1)
        self.reference.extend(found, pack)
        return found

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return int(batch["counts"].sum())

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """Sum over the pairs.

        Metrics: accuracy (pairs whose chosen answer gained more), margin, reward_chosen, reward_rejected (β times the
        log-ratios), log_p_chosen, log_p_rejected.
        """
        found = model(**model_inputs(batch, model, "shift_labels"))
        ratios = self.reference.ratios(model, found.log_probs, batch).view(-1, 2)
        tokens, counts = (on(batch[name], ratios.device) for name in ("targets", "counts"))
        tokens = tokens.view(-1, 2)
        pairs = Pairs(ratios[:, 0], ratios[:, 1], tokens[:, 0], tokens[:, 1])
        values = self._loss(pairs, self.beta, **self._options)
        total = torch.where(counts, values, 0.0).sum() + router_term(model, found, self.count(batch))
        rewards = self.beta * ratios.detach()
        log_p = document_sums(found.log_probs.detach(), batch).view(-1, 2)

        def over(column: Tensor) -> Tensor:
            return torch.where(counts, column, 0.0).sum()

        return LossSum(
            total,
            {
                "accuracy": over((rewards[:, 0] > rewards[:, 1]).to(rewards.dtype)),
                "margin": over(rewards[:, 0] - rewards[:, 1]),
                "reward_chosen": over(rewards[:, 0]),
                "reward_rejected": over(rewards[:, 1]),
                "log_p_chosen": over(log_p[:, 0]),
                "log_p_rejected": over(log_p[:, 1]),
            },
        )
