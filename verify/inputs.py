"""Inputs of a comparison: token ids, masks, positions and labels, drawn from a seed, hashable by content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """Keyword arguments of one forward call of either side; None is not passed.

    Shapes: `input_ids`, `attention_mask` (1 = real), `position_ids`, `labels` are (B, T) int64.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None

    def kwargs(self) -> dict[str, Tensor]:
        """The arguments that are set."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def key(self) -> str:
        """A hash of names, shapes and contents, for memoisation."""
        digest = hashlib.sha256()
        for name, value in self.kwargs().items():
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def without_labels(self) -> Inputs:
        """The same without labels."""
        return replace(self, labels=None)

    def with_labels(self) -> Inputs:
        """The same with labels equal to the tokens; padding and a few positions in between are ignored (−100)."""
        labels = self.input_ids.clone()
        labels[:, 5::7] = -100
        if self.attention_mask is not None:
            labels[self.attention_mask == 0] = -100
        return replace(self, labels=labels)


def tokens(vocab_size: int, batch: int, length: int, seed: int) -> Tensor:
    """Random ids (batch, length) in [0, vocab_size)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (batch, length), generator=generator)
