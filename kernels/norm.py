"""Normalisation of rows: RMSNorm (arXiv:1910.07467) in the three forms that decoders use, LayerNorm without a bias."""

import torch
from torch import Tensor

from bestiary.kernels import lean
from bestiary.kernels.dispatch import choose
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.triton_runtime import norm_obstacle


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    scale_then_cast: bool = False,
    centred: bool = False,
) -> Tensor:
    """x / sqrt(mean(x²) + eps), then the weight.

        cast_then_scale   w · cast(x̂)            Llama, Qwen3
        scale_then_cast   cast(w · x̂)            GPT-OSS, OLMo 2
        plus_one          1 + w in place of w     Gemma, with scale_then_cast
        centred           x − mean(x) first       Cohere 2: LayerNorm (arXiv:1607.06450) without a bias

    Args:
        x: (..., d), any float dtype; the mean and the root run in at least fp32.
        weight: (d,).
    Returns:
        (..., d) in x's dtype.
    """
    obstacles = {"triton": norm_obstacle(x, weight), "lean": lean.obstacle(x, weight), "torch": None}
    if centred:
        obstacles |= dict.fromkeys(("triton", "lean"), "it does not subtract the mean")
    implementation = choose("norm", obstacles)
    if implementation == "triton":
        from bestiary.kernels.triton_norm import rms_norm as fused  # needs the optional triton

        return fused(x, weight, eps, plus_one=plus_one, scale_then_cast=scale_then_cast)
    if implementation == "lean":
        result: Tensor = lean.LeanRMSNorm.apply(x, weight, eps, plus_one, scale_then_cast)
        return result
    wide = x.to(at_least_fp32(x.dtype))
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scale = 1.0 + weight.to(wide.dtype) if plus_one else weight
    if scale_then_cast:
        return (scale * normed).to(x.dtype)
    return (scale * normed.to(x.dtype)).to(x.dtype)
