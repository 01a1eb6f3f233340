"""Supervised fine-tuning: imitate the trained tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from bestiary.models import Decoder
from bestiary.training.data.batch import batch
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind
from bestiary.training.losses import dft
from bestiary.training.recipes.base import Batch, LossSum
from bestiary.training.recipes.documents import model_inputs, router_term, token_sum
from bestiary.training.recipes.names import known


class SFT:
    """Σ over trained tokens of −log p, or of p's own weighting of it.

    Args:
        loss: "nll": −log p(y).
            "dft": −sg(p(y)) · log p(y), which takes the weight 1 / p out of the gradient of the likelihood
            (arXiv:2508.05629, equation 8). TRL's `dft` is the same.
    Raises:
        InvalidRun: an unknown loss.
    """

    name: str = "sft"
    unit: Literal["tokens", "sequences"] = "tokens"
    kinds: frozenset[Kind] = frozenset({"chat", "completion", "text", "distillation", "events"})
    losses: ClassVar[tuple[str, ...]] = ("nll", "dft")
    slices: Literal[True] = True

    def __init__(self, loss: str = "nll") -> None:
        self.loss_name = known(loss, self.losses, "loss.name")

    def batch(self, pack: Pack) -> Batch:
        """Arguments of forward: labels for `nll`, targets in place for `dft`."""
        return dict(batch(pack, shifted=self.loss_name == "dft"))

    def count(self, batch: Batch) -> int:
        """Trained tokens."""
        return int((batch["labels" if self.loss_name == "nll" else "shift_labels"] != -100).sum())

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """The sum over the trained tokens."""
        if self.loss_name == "nll":
            # Divided by one: with a divisor the loss alone has a graph, at three quarters of the cost.
            found = model(**model_inputs(batch, model, "labels"), num_items_in_batch=1)
            more = router_term(model, found, self.count(batch) - 1)  # it is in the loss once
            return token_sum(found.loss + more, batch)
        found = model(**model_inputs(batch, model, "shift_labels"))
        log_probs = found.log_probs
        nll = -log_probs.detach().sum()
        return token_sum(dft(log_probs) + router_term(model, found, self.count(batch)), batch, {"nll": nll})
