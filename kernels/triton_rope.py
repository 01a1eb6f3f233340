"""Rotary position embedding in Triton; the backward pass is the turn by the negative angle."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.triton_runtime import power_of_two, require, rope_obstacle, warps


def heads_of(rotary_dim: int) -> int:
    """Heads that one program turns with the cos and sin it read, a power of two."""
    return max(1, min(2048 // power_of_two(rotary_dim), 16))


@triton.jit
def rope_turn(
    x, cos, sin, out, heads, tokens, half, rest,
    x_batch, x_head, x_token, out_batch, out_head, out_token, angle_batch, angle_token,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turns HEADS heads at one position, BACK by the negative angle; strides in elements."""
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // tokens, place % tokens
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    angle = batch * angle_batch + token * angle_token + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head
    target = out + batch * out_batch + token * out_token + head[:, None] * out_head
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + half
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + second, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        column = tl.arange(0, REST)
        beyond = (head < heads)[:, None] & (column < rest)[None, :]
        passing = tl.load(source + 2 * half + column[None, :], mask=beyond, other=0.0)
        tl.store(target + 2 * half + column[None, :], passing, mask=beyond)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, heads, tokens, head_dim = x.shape
    half = cos.shape[-1]
    rest = head_dim - 2 * half
    out = torch.empty_like(x)  # keeps the order of dimensions, so that (B, T, heads, d) memory stays that
    if not out.numel():
        return out
    if out.stride(-1) != 1:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = heads_of(2 * half)
    rope_turn[(batch * tokens, triton.cdiv(heads, block))](
        x, cos, sin, out, heads, tokens, half, rest, *x.stride()[:3], *out.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        BACK=back, INTERLEAVED=interleaved, HEADS=block, HALF=power_of_two(half),
        REST=power_of_two(rest) if rest else 0, num_warps=min(warps(block * head_dim), 4),
    )  # fmt: skip
    return out


class _Rope(torch.autograd.Function):
    """Saves cos and sin, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(upstream, cos, sin, ctx.interleaved, back=True), None, None, None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn coordinate pairs of `x` by the angles behind `cos` and `sin`: `kernels.rope.apply_rope`, rounded once.

    Args:
        x: (B, heads, T, head_dim) fp32, bf16 or fp16, any strides.
        cos, sin: (B or 1, T, r/2), without gradients; r ≤ head_dim coordinates turn, the rest passes.
    Returns:
        (B, heads, T, head_dim) in x's dtype, laid out as x is where x is dense.
    Raises:
        UnsupportedDispatch: says why Triton cannot run on these tensors.
    Cost:
        One read and one write of x in each direction, one read of cos and sin for up to 16 heads.
    """
    require("rope", rope_obstacle(x, cos, sin))
    # Without a copy where they are dense already; both then have the same strides.
    return _Rope.apply(x, cos.contiguous(), sin.contiguous(), interleaved)
