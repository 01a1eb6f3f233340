"""Load balance of expert routers (Switch Transformer, arXiv:2101.03961, equations 4 to 6)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int, token_mask: Tensor | None = None) -> Tensor:
    """E · Σ_e f_e · p_e, with f the share of top-k assignments and p the mean probability of expert e over all layers.

    Args:
        router_logits: one (N, E) a routed layer.
        token_mask: (N,) weights, 0 for padding tokens; None counts every token.
    Returns:
        () in at least fp32; gradients flow through p alone.
    Source: transformers' load_balancing_loss_func, counts and sums accumulated over layers, normalised once.
    """
    dtype = at_least_fp32(router_logits[0].dtype)
    num_experts = router_logits[0].shape[-1]
    assigned = torch.zeros(num_experts, dtype=dtype, device=router_logits[0].device)
    probability, rows = torch.zeros_like(assigned), torch.zeros((), dtype=dtype, device=assigned.device)
    for logits in router_logits:
        weight = (
            torch.ones(logits.shape[0], dtype=dtype, device=logits.device)
            if token_mask is None
            else token_mask.to(dtype)
        )
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        assigned = assigned.index_add(0, chosen.flatten(), weight.repeat_interleave(top_k))
        probability = probability + (probabilities.to(dtype) * weight[:, None]).sum(0)
        rows = rows + weight.sum()
    return num_experts * (assigned / rows * (probability / rows)).sum()
