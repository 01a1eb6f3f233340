"""Rows of routed experts in Triton: gathered in sorted order, weighted and summed back, and the backward activation.

Every output is written by one program, in a fixed order of sums, so results are the same in every run. The operator in
`experts_sorted` puts them together: the gradient of a gather is `combine_rows` without weights, that of a combination
are `gather_rows` and `weighted_gated_back`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.triton_activation import KINDS, _curve
from bestiary.kernels.triton_runtime import as_rows

BLOCK = 1024
WARPS = 4


@triton.jit
def expert_rows_gather(x, order, out, width, x_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = x[order[row] // TOP_K]: a program for BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row) // TOP_K
    values = tl.load(x + token * x_stride + column, mask=column < width, other=0.0)
    tl.store(out + row * width + column, values, mask=column < width)


@triton.jit
def expert_rows_combine(
    y, weights, inverse, last, out, width, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """out[n] = Σ_k weights[n, k] · y[inverse[n, k]] of rows before *last: a program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(last)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + k)
        real = tl.where(row < end, width, 0)  # columns of it
        part = tl.load(y + row * width + column, mask=column < real, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights + token * TOP_K + k).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def expert_gated_backward(
    gate_up, pull, weights, order, last, inner, of_both, of_weights, width, alpha, limit,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward through w · act(gate) · up: a program for one row, whose gradient of w it sums block by block."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order + row)
    w = tl.load(weights + place).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(pull + row * width + column, mask=inside, other=0.0).to(tl.float32)
        weighted = p * w
        pull_gate, pull_up = weighted, weighted
        if KIND == 3:
            pull_gate = tl.where(g > limit, 0.0, weighted)
            pull_up = tl.where((u > limit) | (u < -limit), 0.0, weighted)
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + 1.0
        active, slope = _curve(g, alpha, KIND)
        total += tl.where(inside, active * u * p, 0.0)
        tl.store(inner + row * width + column, (active * u * w).to(inner.dtype.element_ty), mask=inside)
        of_gate = of_both + row * 2 * width + column
        tl.store(of_gate, (pull_gate * u * slope).to(of_both.dtype.element_ty), mask=inside)
        tl.store(of_gate + width, (pull_up * active).to(of_both.dtype.element_ty), mask=inside)
    tl.store(of_weights + place, tl.where(row < tl.load(last), tl.sum(total, 0), 0.0))


def gather_rows(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """(N, H), (N·K,) positions of sorted choices → (N·K, H) contiguous: row order[i] // K of x at i.

    Cost: one read and one write of the output; a row that several experts want is read again from the cache.
    """
    x = as_rows(x)
    out = x.new_empty((len(order), x.shape[1]))
    if out.numel():
        grid = (len(order), triton.cdiv(x.shape[1], BLOCK))
        expert_rows_gather[grid](x, order, out, x.shape[1], x.stride(0), TOP_K=top_k, BLOCK=BLOCK, num_warps=WARPS)
    return out


def combine_rows(y: Tensor, weights: Tensor | None, inverse: Tensor, ends: Tensor, top_k: int) -> Tensor:
    """(N·K, H) sorted rows → (N, H): Σ_k weights[n, k] · y[inverse[n, k]], summed over k = 0, 1, … in fp32.

    Args:
        weights: (N, K); None: all 1.
        inverse: (N·K,), the sorted row of each choice.
        ends: (E,) int32; a row from ends[-1] on counts as 0, whatever is in it.
    """
    y = y.contiguous()
    tokens, width = len(inverse) // top_k, y.shape[1]
    out = y.new_empty((tokens, width))
    if out.numel():
        expert_rows_combine[(tokens, triton.cdiv(width, BLOCK))](
            y, None if weights is None else weights.contiguous(), inverse, ends[-1:], out, width,
            TOP_K=top_k, WEIGHTED=weights is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def weighted_gated_back(
    gate_up: Tensor,
    pull: Tensor,
    weights: Tensor,
    order: Tensor,
    ends: Tensor,
    activation: str,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`experts_activation.activate_back` on sorted rows, rounded once.

    Args:
        gate_up: (N·K, 2I).   pull: (N·K, I).   weights: (N, K).   order, ends: of `Routing`.
    Returns:
        w · act(gate) · up (N·K, I), the gradient of `gate_up` (N·K, 2I), and that of the weights (N·K,) in fp32 at
        the places of the choices, 0 for rows behind the last expert.
    """
    gate_up, pull = gate_up.contiguous(), pull.contiguous()
    inner, of_both = torch.empty_like(pull, dtype=gate_up.dtype), torch.empty_like(gate_up)
    of_weights = torch.empty(len(order), dtype=at_least_fp32(gate_up.dtype), device=gate_up.device)
    if len(order):
        expert_gated_backward[(len(order),)](
            gate_up, pull, weights.contiguous(), order, ends[-1:], inner, of_both, of_weights, pull.shape[1],
            alpha or 1.0, limit, KIND=KINDS[activation], BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return inner, of_both, of_weights
