"""Gated activations of MLPs and experts."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) · up, with `activation` one of silu, gelu, gelu_pytorch_tanh (arXiv:2002.05202). Any equal shapes."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * up


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate·sigmoid(alpha·gate)·(up + 1), gate ≤ limit, |up| ≤ limit (transformers' GptOssExperts). Any equal shapes."""
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
