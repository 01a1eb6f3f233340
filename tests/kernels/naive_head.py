"""Everything the log-prob core computes, from all logits at once."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels import log_prob_reference, vocab_tiles
from bestiary.kernels.log_prob import LogProb

HIDDEN = 12
MAPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "cap": {"softcap": 1.3},
    "divisor, cap and temperature": {"divisor": 1.9, "softcap": 1.3, "temperature": 2.5},
}


class Case(NamedTuple):
    """Hidden states, weight, targets of which about a third are ignored, and a bias."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor

    def leaves(self) -> "Case":
        """A copy with gradients on."""
        hidden, weight, bias = (tensor.detach().clone().requires_grad_() for tensor in (self[0], self[1], self[3]))
        return Case(hidden, weight, self.target, bias)


def case(tokens: int, vocab: int, seed: int = 0, ignored: float = 0.3, size: int = HIDDEN) -> Case:
    generator = torch.Generator().manual_seed(seed)
    new: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    hidden, weight = torch.randn(tokens, size, **new), torch.randn(vocab, size, **new)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target = target.masked_fill(torch.rand(tokens, generator=generator) < ignored, -100)
    return Case(hidden, weight, target, torch.randn(vocab, **new))


def logits_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    logits = hidden @ weight.T / divisor
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def naive(hidden: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int = -100, **logit_map: Any) -> LogProb:
    """Every column of `LogProb`."""
    logits = logits_of(hidden, weight, **logit_map)
    log_p = logits.log_softmax(-1)
    valid = target != ignore_index
    columns = (
        log_p.gather(-1, target.where(valid, 0)[:, None]).squeeze(-1),
        logits.exp().sum(-1).log(),
        -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1),
        logits.argmax(-1),
        logits.mean(-1),
    )
    return LogProb(*(c.where(valid, -1 if i == 3 else 0) for i, c in enumerate(columns)))


def naive_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: float | None = None,
    **logit_map: Any,
) -> Tensor:
    """torch's cross entropy of all logits, with token weights and the z-loss."""
    logits = logits_of(hidden, weight, **logit_map)
    valid = target != -100
    terms = F.cross_entropy(logits, target, class_weights, reduction="none", label_smoothing=label_smoothing)
    terms = terms + z_loss * logits.logsumexp(-1).square() * valid
    items = valid.to(logits.dtype) if class_weights is None else class_weights[target.where(valid, 0)] * valid
    if token_weights is not None:
        terms, items = terms * token_weights, items * token_weights
    if reduction == "none":
        return terms
    if reduction == "sum":
        return terms.sum()
    return terms.sum() / (items.sum() if num_items is None else num_items)


def in_small_pieces(monkeypatch: Any) -> None:
    """Tiles of 64 columns and chunks of one to three tokens, so that tiny shapes have many of both."""
    monkeypatch.setattr(vocab_tiles, "COLUMNS", 64)
    monkeypatch.setattr(vocab_tiles, "ROWS", 2)
    monkeypatch.setattr(vocab_tiles, "HELD_BYTES", 1)
    monkeypatch.setattr(vocab_tiles, "HELD_ROWS", (1, 6, 6))
    monkeypatch.setattr(log_prob_reference, "LOGITS_PER_CHUNK", 200)
