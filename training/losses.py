"""Losses over log-probabilities of tokens, and scores: pure functions that return sums or a value a sequence, no means.

Those over pairs and labelled answers stand in `losses_preference`, divergences from a teacher in
`bestiary.kernels.divergence`.
"""

import torch.nn.functional as F
from torch import Tensor


def nll(log_probs: Tensor) -> Tensor:
    """−Σ log p.

    Args:
        log_probs: any shape, 0 where ignored.
    Returns:
        ().
    """
    return -log_probs.sum()


def dft(log_probs: Tensor) -> Tensor:
    """−Σ sg(p) log p: dynamic fine-tuning (arXiv:2508.05629, equation 9), as TRL's `loss_type="dft"`.

    Each token is weighed by its own probability, through which no gradient flows.

    Args:
        log_probs: any shape, 0 where ignored.
    Returns:
        ().
    """
    return -(log_probs.detach().exp() * log_probs).sum()


def pairwise(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, centring: float = 0.0) -> Tensor:
    """−log σ(s_c − s_r − margin) + centring · (s_c + s_r)²: Bradley–Terry with a margin (Llama 2, arXiv:2307.09288).

    The second term holds scores near 0 (arXiv:2312.09244), as TRL's `center_rewards_coefficient`.

    Args:
        chosen, rejected: scores (pairs,).   margin: (pairs,) or one for all.
    Returns:
        (pairs,).
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + centring * (chosen + rejected) ** 2 if centring else loss


def squared(score: Tensor, wanted: Tensor) -> Tensor:
    """(s − wanted)², for data that gives a score to each answer (HelpSteer2, arXiv:2406.08673).

    Args:
        score, wanted: (documents,).
    Returns:
        (documents,).
    """
    return (score - wanted.to(score.dtype)) ** 2
