"""What the implementations of the log-prob core share: what is asked for and what comes back."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bestiary.kernels.errors import InvalidArgument, LabelOutOfRange
from bestiary.kernels.vocab_parallel import VocabShard


class LogProb(NamedTuple):
    """Per token, each (N,), at least fp32, 0 where the target is ignored; None where it was not asked for.

    log_prob: log p(target).   lse: log-sum-exp of the logits.   entropy: −Σ p log p, in nats.
    top1: int64, the most probable token (the smallest id among equals), −1 where ignored.
    logit_mean: mean logit over the vocabulary.
    """

    log_prob: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    top1: Tensor | None = None
    logit_mean: Tensor | None = None

    def detached(self) -> "LogProb":
        """The same numbers without a graph."""
        return LogProb._make(None if column is None else column.detach() for column in self)


@dataclass(frozen=True)
class LogitMap:
    """z = cap(h Wᵀ / divisor + b) / temperature, with cap(u) = softcap · tanh(u / softcap) or u.

    It is computed as outer · tanh(h·inner Wᵀ + b·bias_factor), or without a cap as h·inner Wᵀ + b·bias_factor: the
    constants multiply (R, H) hidden states and not (R, V) logits.
    """

    divisor: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("divisor", self.divisor), ("softcap", self.softcap), ("temperature", self.temperature)):
            if value is not None and not value > 0:
                raise InvalidArgument(f"{name} = {value} is not positive.", remedy=f"pass {name} > 0, or leave it out")

    @property
    def bias_factor(self) -> float:
        """What multiplies the bias before the cap."""
        return 1.0 / (self.temperature if self.softcap is None else self.softcap)

    @property
    def inner(self) -> float:
        """What multiplies the hidden states before the cap."""
        return self.bias_factor / self.divisor

    @property
    def outer(self) -> float | None:
        """What multiplies the tanh; None without a cap."""
        return None if self.softcap is None else self.softcap / self.temperature


@dataclass(frozen=True)
class Wanted:
    """Which columns of `LogProb` to compute.

    mean_weights: (V,) in at least fp32, of this rank's part of the vocabulary: `logit_mean` becomes their sum with the
        logits (label smoothing with class weights); None: 1 / V each.
    """

    entropy: bool = False
    top1: bool = False
    logit_mean: bool = False
    mean_weights: Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """What a call of the core is besides its tensors.

    dtype: of logits, sums and results.   vocab_size: of the whole vocabulary.   shard: this rank's part; None: it all.
    """

    logit_map: LogitMap
    wanted: Wanted
    ignore_index: int
    dtype: torch.dtype
    vocab_size: int
    shard: VocabShard | None


@dataclass(frozen=True)
class ScalarLoss:
    """loss = Σ_i label[i] · log_prob_i + token[i] · (z_loss · lse_i² − smoothing · (logit_mean_i − mean_mass · lse_i)).

    label, token: (N,) in at least fp32, the normalisation inside, 0 where the target is ignored.
    mean_mass: Σ of the weights of `logit_mean` over the whole vocabulary (1 without class weights).
    """

    label: Tensor
    token: Tensor
    smoothing: float = 0.0
    mean_mass: Tensor | float = 1.0
    z_loss: float = 0.0

    def terms(self, out: LogProb) -> Tensor:
        """(N,) the summands, of computed log-probabilities."""
        terms = self.label * out.log_prob
        if self.z_loss:
            terms = terms + self.z_loss * self.token * out.lse.square()
        if self.smoothing and out.logit_mean is not None:
            terms = terms - self.smoothing * self.token * (out.logit_mean - self.mean_mass * out.lse)
        return terms


def check_labels(target: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Raises `LabelOutOfRange` for the first label that is neither `ignore_index` nor in [0, vocab_size)."""
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if wrong.any():
        position = int(wrong.nonzero()[0])
        raise LabelOutOfRange(
            f"label {int(target[position])} at flat position {position} is outside [0, {vocab_size}) "
            "and not ignore_index.",
            remedy="mask it with ignore_index = -100, or check the tokenizer against vocab_size",
        )
