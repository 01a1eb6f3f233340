"""Rotary position embedding (arXiv:2104.09864) on the leading coordinates of each head."""

import torch
from torch import Tensor

from bestiary.kernels.dispatch import choose
from bestiary.kernels.triton_runtime import rope_obstacle


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn coordinate pairs of `x` by the angles behind `cos` and `sin`.

        (a, b) → (a·cos − b·sin, b·cos + a·sin),   pairs (i, i + r/2), or (2i, 2i + 1) if `interleaved`

    Args:
        x: (B, heads, T, head_dim).
        cos, sin: (B or 1, T, r/2), in x's dtype or wider; r ≤ head_dim coordinates turn, the rest passes.
    Returns:
        (B, heads, T, head_dim) in x's dtype; the turn runs in that of cos and sin.
    """
    if choose("rope", {"triton": rope_obstacle(x, cos, sin), "torch": None}) == "triton":
        from bestiary.kernels.triton_rope import apply_rope as fused  # needs the optional triton

        return fused(x, cos, sin, interleaved=interleaved)
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((turned_a, turned_b), -1).flatten(-2) if interleaved else torch.cat((turned_a, turned_b), -1)
    turned = turned.to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, rest), dim=-1)
