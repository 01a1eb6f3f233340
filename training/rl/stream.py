"""Answers packed into one row: what a policy loss reads at every token, and sums over the documents of a pack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence", "sequence_token", "product"]
FAR = 20.0  # |log π / π_old| beyond which a ratio is held, as verl does: e²⁰ is no ratio of policies, but an overflow


@dataclass(frozen=True)
class Stream:
    """Log-probabilities of a pack, and where its documents are.

    All values stand at the position that predicts a token, as `shift_labels` does. What stands where nothing is trained
    is read by nothing.

    Attributes:
        log_probs: (1, T), of the policy, with its graph.
        old: (1, T), of the policy that the ratio is against, without one.
        advantages: (1, T).
        trained: (1, T) bool.
        document: (T,) int64, padding being document number `documents`.
        documents: without the padding.
    """

    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    trained: Tensor
    document: Tensor
    documents: int

    @cached_property
    def counts(self) -> Tensor:
        """Trained tokens of each document, (documents,), at least 1, in the dtype of the log-probabilities."""
        return self.sums(torch.ones_like(self.log_probs)).clamp(min=1.0).detach()

    def masked(self, values: Tensor) -> Tensor:
        """`values` (1, T) where trained, 0 elsewhere, whatever stands there."""
        return torch.where(self.trained, values, 0.0)

    def sums(self, values: Tensor) -> Tensor:
        """Over the trained tokens of each document: (1, T) → (documents,)."""
        found = values.new_zeros(self.documents + 1)
        return found.index_add(0, self.document, self.masked(values)[0])[:-1]

    def means(self, values: Tensor) -> Tensor:
        """The same, divided by the trained tokens; 0 for a document without any."""
        return self.sums(values) / self.counts

    def spread(self, values: Tensor) -> Tensor:
        """(documents,) → (1, T), the value of its document at each position; 0 in the padding."""
        return torch.cat([values, values.new_zeros(1)])[self.document][None]

    def log_ratio(self, level: Level = "token") -> Tensor:
        """log π / π_old of what is importance-weighted, (1, T), 0 where nothing is trained.

        Levels:
            token: of each token.
            sequence: the mean over the document's tokens, the same at each: GSPO (arXiv:2507.18071, equation 7).
            sequence_token: its value with the gradient of the token's own log-probability (equation 14, GSPO-token),
                so that advantages may differ between tokens.
            product: the sum over the document's tokens, an answer being one action.
        """
        difference = self.masked(self.log_probs - self.old)
        if level == "sequence":
            difference = self.spread(self.means(difference))
        elif level == "product":
            difference = self.spread(self.sums(difference))
        elif level == "sequence_token":
            mean = self.spread(self.means(difference)).detach()
            difference = self.masked(self.log_probs - self.log_probs.detach()) + mean
        return difference.clamp(-FAR, FAR)
