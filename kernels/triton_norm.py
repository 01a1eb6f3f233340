"""RMSNorm in Triton, forward and backward: one pass over memory each, nothing but the inputs saved."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.triton_runtime import as_rows, norm_obstacle, power_of_two, require, warps

_PROGRAMS = 528  # of the backward pass, each with a share of the weight's gradient: 4 for each of 132 processors


class Launch(NamedTuple):
    """Rows and columns (powers of two) of one program's block, and its warps, more of them in the backward pass."""

    rows: int
    block: int
    warps: int
    back_warps: int


def launch(d: int) -> Launch:
    """A function of the width alone: short rows, as of q and k norms, share a program."""
    block = power_of_two(d)
    rows = max(1, 1024 // block)
    forward = warps(rows * block)
    return Launch(rows, block, forward, 2 * forward)


@triton.jit
def rms_norm_forward(
    x, weight, out, count, d, x_stride, out_stride, eps,
    PLUS_ONE: tl.constexpr, SCALE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x̂ times the weight: a program for ROWS rows, each whole."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < d)[None, :]
    wide = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / d + eps)[:, None]
    if not SCALE_FIRST:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    scaled = (scale[None, :] * normed).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * out_stride + column[None, :], scaled, mask=inside)


@triton.jit
def rms_norm_backward(
    x, weight, upstream, of_x, of_weight, count, d, x_stride, upstream_stride, of_x_stride, eps,
    PLUS_ONE: tl.constexpr, SCALE_FIRST: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and a row of `of_weight` (programs, d): each program walks over blocks of ROWS rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < d
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * ROWS, count, tl.num_programs(0).to(tl.int64) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & real[None, :]
        wide = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 1) / d + eps)[:, None]
        normed = wide * root
        pull = tl.load(
            upstream + row[:, None] * upstream_stride + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)  # fmt: skip
        if NEED_WEIGHT:
            rounded = normed
            if not SCALE_FIRST:
                rounded = normed.to(x.dtype.element_ty).to(tl.float32)
            total += pull * rounded
        pull = pull * scale[None, :]
        slope = root * (pull - normed * (tl.sum(pull * normed, 1) / d)[:, None])
        tl.store(
            of_x + row[:, None] * of_x_stride + column[None, :], slope.to(of_x.dtype.element_ty), mask=inside
        )  # fmt: skip
    if NEED_WEIGHT:
        tl.store(of_weight + program * d + column, tl.sum(total, 0), mask=real)


class _RMSNorm(torch.autograd.Function):
    """Saves x and the weight; the root is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool, scale_first: bool) -> Tensor:
        rows, weight = as_rows(x), weight.contiguous()
        count, d = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        shape = launch(d)
        if out.numel():
            rms_norm_forward[(triton.cdiv(count, shape.rows),)](
                rows, weight, out, count, d, rows.stride(0), d, eps,
                PLUS_ONE=plus_one, SCALE_FIRST=scale_first, ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.warps,
            )  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.setting = (eps, plus_one, scale_first)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        eps, plus_one, scale_first = ctx.setting
        rows, pull = as_rows(x), as_rows(upstream)
        count, d = rows.shape
        shape = launch(d)
        programs = min(_PROGRAMS, triton.cdiv(count, shape.rows))
        of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = torch.empty(programs, d, dtype=at_least_fp32(x.dtype), device=x.device)
        if of_x.numel():
            rms_norm_backward[(programs,)](
                rows, weight, pull, of_x, partial, count, d, rows.stride(0), pull.stride(0), d, eps,
                PLUS_ONE=plus_one, SCALE_FIRST=scale_first, NEED_WEIGHT=ctx.needs_input_grad[1],
                ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.back_warps,
            )  # fmt: skip
        of_weight = partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, scale_then_cast: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps), then the weight: `kernels.norm.rms_norm` with the same casts.

    The gradient runs in fp32 from end to end and is rounded once; the weight's is summed in a fixed order.

    Args:
        x: (..., d) fp32, bf16 or fp16, any strides.   weight: (d,).
    Returns:
        (..., d) contiguous, in x's dtype.
    Raises:
        UnsupportedDispatch: says why Triton cannot run on these tensors.
    Cost:
        Forward one read and one write of x; backward two reads and one write, plus at most 528 · d fp32 numbers.
    """
    require("norm", norm_obstacle(x, weight))
    return _RMSNorm.apply(x, weight, eps, plus_one, scale_then_cast)
