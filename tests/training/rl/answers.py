"""Random answers of unequal lengths, as a padded matrix (what other implementations take) and as one packed row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bestiary.training.rl.stream import Stream

LENGTHS = (7, 3, 9, 1, 6, 8)
PROMPTS = (4, 2, 5, 3, 1, 2)


@dataclass(frozen=True)
class Answers:
    """(answers, width) each, float64; `mask` is float, advantages are those of an answer at each of its tokens."""

    log_probs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor

    def leaf(self) -> Answers:
        """The same with a leaf that takes gradients in place of the policy's log-probabilities."""
        return replace(self, log_probs=self.log_probs.detach().clone().requires_grad_(True))

    def packed(self, values: Tensor) -> Tensor:
        """(answers, width) → (1, T): answers one after the other, something unread before each and behind all."""
        return torch.cat([self._row(values, row) for row in range(len(values))] + [values.new_full((3,), 7.0)])[None]

    def _row(self, values: Tensor, row: int) -> Tensor:
        length = int(self.mask[row].sum())
        return torch.cat([values.new_full((PROMPTS[row % len(PROMPTS)],), 0.3), values[row, :length]])

    def stream(self, advantages: Tensor | None = None) -> Stream:
        """As the losses take it."""
        lengths = [PROMPTS[row % len(PROMPTS)] + int(self.mask[row].sum()) for row in range(len(self.mask))]
        document = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, 3]))
        trained = self.packed(self.mask) == 1.0
        trained[0, -3:] = False
        return Stream(
            self.packed(self.log_probs),
            self.packed(self.old),
            self.packed(self.advantages if advantages is None else advantages),
            trained,
            document,
            len(lengths),
        )


def answers(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.3) -> Answers:
    """Log-probabilities whose ratios lie on both sides of every usual bound."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).double()
    old = -drawn(len(lengths), width).abs() - 0.1
    return Answers(
        log_probs=old + spread * drawn(len(lengths), width),
        old=old,
        rollout=old + spread * drawn(len(lengths), width),
        reference=old + spread * drawn(len(lengths), width),
        entropy=drawn(len(lengths), width).abs(),
        advantages=drawn(len(lengths), 1).expand(-1, width).clone(),
        mask=mask,
    )
