"""Losses over answers with a better one beside them (DPO and relatives) or a label (KTO): a value a pair or an answer.

Everything is a function of log-ratios log π(y|x) − log π_ref(y|x), summed over the tokens of an answer.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Pairs(NamedTuple):
    """Log-ratios of both answers, (pairs,), and how many tokens each answer has, (pairs,)."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def margin(self) -> Tensor:
        """h: by how much the policy prefers the chosen answer more than the reference does."""
        return self.chosen - self.rejected

    @property
    def mean_margin(self) -> Tensor:
        """The same of log-ratios per token."""
        chosen, rejected = (
            ratio / tokens.clamp(min=1).to(ratio.dtype)
            for ratio, tokens in ((self.chosen, self.chosen_tokens), (self.rejected, self.rejected_tokens))
        )
        return chosen - rejected


def sigmoid(pairs: Pairs, beta: float) -> Tensor:
    """−log σ(β h): DPO (arXiv:2305.18290, equation 7). Exactly ln 2 where policy and reference agree."""
    return -F.logsigmoid(beta * pairs.margin)


def sigmoid_norm(pairs: Pairs, beta: float) -> Tensor:
    """−log σ(β h̄) with log-ratios per token: length-normalised DPO (Tülu 3, arXiv:2411.15124, equation 6).

    As TRL's `sigmoid_norm`; SimPO also divides by the length, and has no reference.
    """
    return -F.logsigmoid(beta * pairs.mean_margin)


def ipo(pairs: Pairs, beta: float) -> Tensor:
    """(h̄ − 1 / 2β)²: IPO (arXiv:2310.12036, equation 17), β being its τ.

    h̄ is of log-ratios per token, as in TRL, whose authors asked those of the paper; OpenRLHF takes sums over the
    answer, with which the loss grows with its length.
    """
    return (pairs.mean_margin - 1.0 / (2.0 * beta)) ** 2


def hinge(pairs: Pairs, beta: float) -> Tensor:
    """max(0, 1 − β h): the loss of SLiC (arXiv:2305.10425) on DPO's margin (RSO, arXiv:2309.06657)."""
    return torch.relu(1.0 - beta * pairs.margin)


def robust(pairs: Pairs, beta: float, label_smoothing: float = 0.1) -> Tensor:
    """(−(1 − ε) log σ(β h) + ε log σ(−β h)) / (1 − 2ε): unbiased where a share ε < ½ of the pairs is swapped.

    Robust DPO (arXiv:2403.00409, equation 12). Conservative DPO, its relative, has +ε … and no divisor. Also ln 2 where
    policy and reference agree.
    """
    right, wrong = F.logsigmoid(beta * pairs.margin), F.logsigmoid(-beta * pairs.margin)
    return (label_smoothing * wrong - (1.0 - label_smoothing) * right) / (1.0 - 2.0 * label_smoothing)


def apo_zero(pairs: Pairs, beta: float) -> Tensor:
    """1 − σ(β r_c) + σ(β r_r): APO-zero (arXiv:2408.06266, equation 7), for chosen answers above the policy's level."""
    return torch.sigmoid(-beta * pairs.chosen) + torch.sigmoid(beta * pairs.rejected)


def apo_down(pairs: Pairs, beta: float) -> Tensor:
    """σ(β r_c) + 1 − σ(β h): APO-down (arXiv:2408.06266, equation 8), for chosen answers below the policy's level."""
    return torch.sigmoid(beta * pairs.chosen) + torch.sigmoid(-beta * pairs.margin)


PAIRED: Mapping[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "sigmoid_norm": sigmoid_norm,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}


def kto(ratio: Tensor, wanted: Tensor, beta: float, z: Tensor | float = 0.0) -> Tensor:
    """1 − σ(β (r − z)) where wanted, 1 − σ(β (z − r)) elsewhere: KTO (arXiv:2402.01306, equation 8), unweighted.

    Args:
        ratio: log-ratios r (documents,).   wanted: (documents,) bool.
        z: estimate of KL(π ‖ π_ref), not negative, without a graph.
    Returns:
        (documents,).
    """
    distance = beta * (ratio - z)
    return torch.sigmoid(torch.where(wanted, -distance, distance))


def apo_zero_unpaired(ratio: Tensor, wanted: Tensor, beta: float, z: Tensor | float = 0.0) -> Tensor:
    """1 − σ(β r) where wanted, σ(β r) elsewhere: APO-zero (arXiv:2408.06266, equation 7) on answers apart; no z.

    Shapes as `kto`.
    """
    return torch.sigmoid(torch.where(wanted, -beta * ratio, beta * ratio))


UNPAIRED: Mapping[str, Callable[..., Tensor]] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def kl_estimate(total: float, pairs: float) -> float:
    """z of `kto`: max(0, mean log-ratio over `pairs` prompts with answers to other prompts); 0 without any."""
    return max(0.0, total / pairs) if pairs else 0.0
