"""The product of a linear layer and its low-rank adapter in Triton: one pass, one rounding."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.triton_runtime import as_rows, power_of_two


class Launch(NamedTuple):
    """A program's tile of the result, its step along the inner dimension, and what the compiler is told."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    group: int = 8  # row tiles that share a column tile one after another, so that it stays in the cache
    warps: int = 8


LAUNCH = Launch()


@triton.jit
def low_rank_linear(
    x, weight, bias, low, high, out, rows, columns, depth, rank, scaling,
    x_stride, weight_stride, weight_step, low_stride, high_stride, high_step, out_stride,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out = x Wᵀ + bias + scaling · low Hᵀ: a program for one tile.

    The accumulator of the long product starts as the short one, so that it is held once.
    """
    program = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    first_row = program // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, ROWS) - first_row, GROUP)
    within = program % (GROUP * across)
    row = (first_row + within % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (within // height).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < rows, column < columns

    part = tl.arange(0, RANK)
    short = tl.load(
        low + row[:, None] * low_stride + part[None, :], mask=real_row[:, None] & (part < rank)[None, :], other=0.0
    )  # fmt: skip
    tall = tl.load(
        high + column[None, :] * high_stride + part[:, None] * high_step,
        mask=real_column[None, :] & (part < rank)[:, None], other=0.0,
    )  # fmt: skip
    total = tl.dot(short, tall, input_precision="ieee") * scaling
    if HAS_BIAS:
        total += tl.load(bias + column, mask=real_column, other=0.0).to(tl.float32)[None, :]

    step = tl.arange(0, DEPTH)
    lefts = x + row[:, None] * x_stride + step[None, :]
    rights = weight + column[None, :] * weight_stride + step[:, None] * weight_step
    for first in range(0, depth, DEPTH):
        inside = step < depth - first
        left = tl.load(lefts, mask=real_row[:, None] & inside[None, :], other=0.0)
        right = tl.load(rights, mask=inside[:, None] & real_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        lefts += DEPTH
        rights += DEPTH * weight_step
    place = out + row[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, high: Tensor, scaling: float) -> Tensor:
    """x Wᵀ + bias + scaling · low Hᵀ, summed in fp32 and rounded once.

    Args:
        x: (..., in).   weight: (out, in) or the transpose of an (in, out) tensor.   bias: (out,) or None.
        low: (..., r).   high: (out, r), likewise. All of one dtype (`triton_runtime.lora_obstacle`).
    Returns:
        (..., out) contiguous.
    Cost:
        One read of the inputs a tile and one write of the result: the low-rank product adds N·r to what is read.
    """
    rows, low_rows, weight, high = as_rows(x), as_rows(low), _with_a_unit_stride(weight), _with_a_unit_stride(high)
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    columns, depth, rank = len(weight), weight.shape[1], high.shape[1]
    count = out.numel() // columns  # where in is 0, `rows` is empty and the result is not
    shape = LAUNCH
    grid = (triton.cdiv(count, shape.rows) * triton.cdiv(columns, shape.columns),)
    low_rank_linear[grid](
        rows, weight, None if bias is None else bias.contiguous(), low_rows, high, out,
        count, columns, depth, rank, scaling,
        rows.stride(0), weight.stride(0), weight.stride(1), low_rows.stride(0), high.stride(0), high.stride(1), columns,
        HAS_BIAS=bias is not None, RANK=rank_block(rank), ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=shape.depth,
        GROUP=shape.group, num_warps=shape.warps,
    )  # fmt: skip
    return out


def rank_block(rank: int) -> int:
    """Columns of the short product: matrix instructions take at least 16."""
    return max(power_of_two(rank), 16)


def _with_a_unit_stride(matrix: Tensor) -> Tensor:
    return matrix if 1 in matrix.stride() else matrix.contiguous()
