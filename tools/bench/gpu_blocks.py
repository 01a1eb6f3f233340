"""For the GPU script: errors of norm, RoPE and activations against float64, each implementation forced in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bestiary.kernels.activation import clamped_swiglu, gated
from bestiary.kernels.dispatch import force
from bestiary.kernels.norm import rms_norm
from bestiary.kernels.rope import apply_rope

if TYPE_CHECKING:
    from bestiary.tools.bench.gpu_work import Place

# Case → operation, function of the drawn tensors.
Work = Callable[..., Tensor]
BLOCKS: dict[str, tuple[str, Work]] = {
    "RMSNorm": ("norm", lambda x, w: rms_norm(x, w, 1e-6)),
    "RMSNorm, scale then cast, 1 + w": ("norm", lambda x, w: rms_norm(x, w, 1e-6, plus_one=True, scale_then_cast=True)),
    "RoPE": ("rope", lambda x, w: _turned(x, interleaved=False)),
    "RoPE, interleaved": ("rope", lambda x, w: _turned(x, interleaved=True)),
    "SwiGLU": ("activation", lambda x, w: gated(*_halves(x), "silu")),
    "GeGLU": ("activation", lambda x, w: gated(*_halves(x), "gelu_pytorch_tanh")),
    "clamped SwiGLU": ("activation", lambda x, w: clamped_swiglu(*_halves(x), 1.702, 7.0)),
}


def block_error(place: Place, dtype: torch.dtype, case: str, arm: str) -> dict[str, float]:
    """The largest relative error of the output and the gradients, in the norm of all their numbers."""
    operation, work = BLOCKS[case]
    tokens, heads, width = (5, 2, 16) if place.dry else (1024, 8, 128)
    leaves = [place.draw(2, heads, tokens, width, seed=0, dtype=dtype), place.draw(width, seed=1, dtype=dtype)]
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact = _with_gradients(work, wide)
    with force(**{operation: arm}):
        found = _with_gradients(work, leaves)
    return {
        "error": max(
            float((is_.double() - wanted).norm() / wanted.norm()) for is_, wanted in zip(found, exact, strict=True)
        )
    }


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first, second


def _turned(x: Tensor, *, interleaved: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    step = torch.arange(x.shape[-1] // 4, device=x.device, dtype=dtype)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=dtype)[:, None] * 10000.0 ** (-step / len(step))
    return apply_rope(x, angle.cos()[None], angle.sin()[None], interleaved=interleaved)


def _with_gradients(work: Work, leaves: list[Tensor]) -> list[Tensor]:
    out = work(*leaves)
    direction = torch.linspace(-1.0, 1.0, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
    slopes = torch.autograd.grad(out, leaves, direction.to(out.dtype), allow_unused=True)
    return [out.detach(), *(slope for slope in slopes if slope is not None)]
