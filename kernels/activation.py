"""Activations of MLPs and experts, gated and plain."""

import torch
from torch import Tensor

from bestiary.kernels import lean
from bestiary.kernels.dispatch import choose
from bestiary.kernels.triton_runtime import obstacle


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) · up (arXiv:2002.05202). Any equal shapes.

    Args:
        activation: silu, gelu, gelu_pytorch_tanh, relu or relu2.
    """
    unknown = f"it has no {activation}" if activation in {"relu", "relu2"} else None
    obstacles = {"triton": obstacle(gate, up) or unknown, "lean": lean.obstacle(gate, up), "torch": None}
    implementation = choose("activation", obstacles)
    if implementation == "triton":
        from bestiary.kernels.triton_activation import gated as fused  # needs the optional triton

        return fused(gate, up, activation)
    if implementation == "lean":
        result: Tensor = lean.LeanGated.apply(gate, up, activation)
        return result
    return lean.activate(gate, activation) * up


def activated(x: Tensor, activation: str) -> Tensor:
    """act(x), any shape; `activation` as in `gated`. Autograd keeps what the formula needs: there is no other form."""
    return lean.activate(x, activation)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate·sigmoid(alpha·gate)·(up + 1), gate ≤ limit, |up| ≤ limit (transformers' GptOssExperts). Any equal shapes."""
    if choose("activation", {"triton": obstacle(gate, up), "torch": None}) == "triton":
        from bestiary.kernels.triton_activation import clamped_swiglu as fused  # needs the optional triton

        return fused(gate, up, alpha, limit)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
