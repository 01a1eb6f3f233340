"""The log-prob core: log-probabilities of targets under a linear head, without the (N, V) logits."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bestiary.kernels.errors import LabelOutOfRange
from bestiary.kernels.head import head_logits
from bestiary.kernels.precision import at_least_fp32

_LOGITS_PER_CHUNK = 2**26  # 256 MiB of fp32 logits


class LogProb(NamedTuple):
    """Per token, at least fp32, 0 where the target is ignored: log-probability, log-sum-exp, entropy or None."""

    log_prob: Tensor
    lse: Tensor
    entropy: Tensor | None


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> LogProb:
    """Log-probability of `target` under a linear head.

        log p(y | h) = z_y − logsumexp(z),   z = softcap(h Wᵀ / divisor) / temperature

    Ignored tokens are dropped before the projection. Chunks of tokens are recomputed in the backward pass, their size a
    function of V alone.

    Args:
        hidden: (N, H), any float dtype.   weight: (V, H).   target: (N,) int64 in [0, V) or `ignore_index`.
    Returns:
        `LogProb`, each (N,), at least fp32; all-ignored input gives exact zeros that still have a graph.
    Raises:
        LabelOutOfRange: names the first offending index and value.
    Cost:
        2·N·H·V FLOPs forward, 6·N·H·V backward with the recomputation; scratch chunk·V.
    """
    valid = target != ignore_index
    _check_labels(target, valid, weight.shape[0])
    index = valid.nonzero().squeeze(-1)
    kept, kept_target = hidden[index], target[index]
    rows = max(1, _LOGITS_PER_CHUNK // weight.shape[0])
    parts = [
        checkpoint(_chunk, h, weight, t, divisor, softcap, temperature, entropy, use_reentrant=False)
        for h, t in zip(kept.split(rows), kept_target.split(rows), strict=True)
    ]
    zeros = torch.zeros(target.shape, dtype=at_least_fp32(hidden.dtype), device=hidden.device)
    log_prob, lse, spread = (zeros.index_put((index,), torch.cat(column)) for column in zip(*parts, strict=True))
    return LogProb(log_prob, lse, spread if entropy else None)


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    divisor: float,
    softcap: float | None,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = head_logits(hidden, weight, divisor=divisor, softcap=softcap).to(at_least_fp32(hidden.dtype))
    if temperature != 1.0:
        logits = logits / temperature
    lse = logits.logsumexp(-1)
    log_prob = logits.gather(-1, target[:, None]).squeeze(-1) - lse
    spread = lse - (logits * (logits - lse[:, None]).exp()).sum(-1) if entropy else torch.zeros_like(lse)
    return log_prob, lse, spread


def _check_labels(target: Tensor, valid: Tensor, vocab_size: int) -> None:
    if target.device.type != "cpu":  # no synchronisation in the hot path; gather itself asserts on CUDA
        return
    wrong = valid & ((target < 0) | (target >= vocab_size))
    if wrong.any():
        position = int(wrong.nonzero()[0])
        raise LabelOutOfRange(
            f"label {int(target[position])} at flat position {position} is outside [0, {vocab_size}) "
            "and not ignore_index.",
            remedy="mask it with ignore_index = -100, or check the tokenizer against vocab_size",
        )
