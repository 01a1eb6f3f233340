"""Gated activations in Triton; the backward pass computes the activation again from gate and up."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.triton_runtime import as_rows, obstacle, require

BLOCK = 1024
KINDS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "clamped_swiglu": 3}


@triton.jit
def _curve(g, alpha, KIND: tl.constexpr):
    """act(g) and act'(g) in fp32, all as g · share."""
    if KIND == 1:
        share = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = share + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif KIND == 2:  # (1 + tanh u) / 2 = σ(2u)
        share = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        slope = share + g * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    else:
        share = tl.sigmoid(alpha * g)
        slope = share + g * alpha * share * (1.0 - share)
    return g * share, slope


@triton.jit
def gated_forward(
    gate, up, out, width, gate_stride, up_stride, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """act(gate) · up: a program for BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 3:
        g = tl.where(g > limit, limit, g)  # a NaN stays one
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + 1.0
    active, _ = _curve(g, alpha, KIND)
    tl.store(out + row * width + column, (active * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    gate, up, upstream, of_gate, of_up, width, gate_stride, up_stride, upstream_stride, alpha, limit,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, the activation computed again: a program for BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    pull = tl.load(upstream + row * upstream_stride + column, mask=inside, other=0.0).to(tl.float32)
    pull_gate, pull_up = pull, pull
    if KIND == 3:
        pull_gate = tl.where(g > limit, 0.0, pull)
        pull_up = tl.where((u > limit) | (u < -limit), 0.0, pull)
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + 1.0
    active, slope = _curve(g, alpha, KIND)
    tl.store(of_gate + row * width + column, (pull_gate * u * slope).to(of_gate.dtype.element_ty), mask=inside)
    tl.store(of_up + row * width + column, (pull_up * active).to(of_up.dtype.element_ty), mask=inside)


class _Gated(torch.autograd.Function):
    """Saves gate and up, which the projections hold anyway, and not their activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int, alpha: float, limit: float) -> Tensor:
        g, u = as_rows(gate), as_rows(up)
        out = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
        if out.numel():
            grid = (g.shape[0], triton.cdiv(g.shape[1], BLOCK))
            gated_forward[grid](
                g, u, out, g.shape[1], g.stride(0), u.stride(0), alpha, limit, KIND=kind, BLOCK=BLOCK, num_warps=4
            )
        ctx.save_for_backward(gate, up)
        ctx.setting = (kind, alpha, limit)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        kind, alpha, limit = ctx.setting
        g, u, pull = as_rows(gate), as_rows(up), as_rows(upstream)
        of_gate, of_up = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        if of_gate.numel():
            grid = (g.shape[0], triton.cdiv(g.shape[1], BLOCK))
            gated_backward[grid](
                g, u, pull, of_gate, of_up, g.shape[1], g.stride(0), u.stride(0), pull.stride(0), alpha, limit,
                KIND=kind, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
        return of_gate, of_up, None, None, None


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) · up, with `activation` one of silu, gelu, gelu_pytorch_tanh: `kernels.activation.gated`, rounded once.

    Args:
        gate, up: (..., I) of equal shapes, fp32, bf16 or fp16; rows may be slices of one (..., 2I) tensor.
    Returns:
        (..., I) contiguous.
    Raises:
        UnsupportedDispatch: says why Triton cannot run on these tensors.
    Cost:
        Forward two reads and a write; backward three reads and two writes. Nothing but the inputs is saved.
    """
    require("activation", obstacle(gate, up))
    return _Gated.apply(gate, up, KINDS[activation], 1.0, 0.0)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate·sigmoid(alpha·gate)·(up + 1), gate ≤ limit, |up| ≤ limit (transformers' GptOssExperts), as `gated`."""
    require("activation", obstacle(gate, up))
    return _Gated.apply(gate, up, KINDS["clamped_swiglu"], alpha, limit)
