"""How far the policy is from its reference: estimates of KL(π ‖ π_ref) from the log-probabilities of sampled tokens.

With d = log π − log π_ref at a token that π sampled, the mean of each estimate is KL(π ‖ π_ref):

| kind | value | gradient in a loss |
|---|---|---|
| k1 | d | ∇ log π, whose mean is 0: it holds nothing, so the recipe refuses it in the loss |
| k2 | d² / 2, biased, small for near policies | d ∇ log π, whose mean is that of the KL |
| k3 | e^−d + d − 1, never negative | (1 − e^−d) ∇ log π, whose mean is that of KL(π_ref ‖ π) |
| k1+, k3+ | of k1, k3 | of k2, straight through (verl's suffix) |

k1 to k3 are Schulman's (joschu.net/blog/kl-approx.html). TRL multiplies k3 by the importance ratio of the loss and lets
the gradient through both (its `use_bias_correction_kl`, the default since 1.16; DeepSeek-V3.2, arXiv:2512.02556): on
policy the gradient is then that of k2, and off policy it is corrected. That is `kl_weighted` of `losses.Objective`.
verl holds d within ±20 and the value of k3 within ±10, here d within ±20 alone; TRL holds neither.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bestiary.training.rl.stream import FAR

Estimate = Literal["k1", "k2", "k3", "k1+", "k3+"]


def divergence(log_probs: Tensor, reference: Tensor, kind: Estimate = "k3") -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each token.

    Args:
        log_probs, reference: of the same shape; `reference` without a graph.
    Returns:
        of that shape.
    """
    difference = log_probs - reference
    if kind.endswith("+"):
        through = 0.5 * difference**2
        return through - through.detach() + divergence(log_probs, reference, kind[:-1]).detach()  # type: ignore[arg-type]
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    held = (-difference).clamp(-FAR, FAR)
    return held.exp() - held - 1.0
