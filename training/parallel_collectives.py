"""Collectives between activations, each with the collective that its gradient needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup


def enter(x: Tensor, group: Group) -> Tensor:
    """`x`, the same on every rank, into a region where each sees a part of what follows: gradients are summed."""
    entered: Tensor = _Enter.apply(x, group)
    return entered


def total(x: Tensor, group: Group) -> Tensor:
    """Σ over the ranks; what follows is the same on each, and so is its gradient."""
    summed: Tensor = _Total.apply(x, group)
    return summed


def gather_last(x: Tensor, group: Group) -> Tensor:
    """(…, n) of each rank → (…, ranks · n); the gradient is this rank's part of one that is the same on each."""
    gathered: Tensor = _GatherLast.apply(x, group)
    return gathered


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """`x`, whose gradient is multiplied by `factor`."""
    same: Tensor = _ScaledGradient.apply(x, factor)
    return same


def gather_rows(x: Tensor, group: Group, rows: int) -> Tensor:
    """(n, …) of each rank, padded to `rows` → (ranks · rows, …); the gradient is the sum of all ranks' for our rows."""
    gathered: Tensor = _GatherRows.apply(x, group, rows)
    return gathered


def scatter_rows(x: Tensor, group: Group, count: int) -> Tensor:
    """Σ over the ranks of (ranks · rows, …), of which this rank takes the first `count` of its own rows."""
    scattered: Tensor = _ScatterRows.apply(x, group, count)
    return scattered


def gather_heads(k: Tensor, v: Tensor, group: Group, places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values (B, heads, own, d) of each rank's tokens → (B, heads, T, d) of all; gradients are summed.

    Args:
        places: (T,) int64, where each token of the row lies among the ranks · rows that are gathered.
        rows: of each rank, the last ones padding.
    """
    gathered: tuple[Tensor, Tensor] = _GatherHeads.apply(k, v, group, places, rows)
    return gathered


def _summed(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: Group, rows: int) -> Tensor:
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - x.shape[0])).contiguous()
    out = padded.new_empty((dist.get_world_size(group) * rows, *x.shape[1:]))
    dist.all_gather_single(out, padded, group=group)
    return out


def _scattered(x: Tensor, group: Group, count: int) -> Tensor:
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_single(out, x.contiguous(), group=group)
    return out if count == out.shape[0] else out[:count].clone()  # no view: FSDP2 hooks what modules return


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), x.shape[-1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.rank * ctx.size, ctx.size), None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: int) -> Tensor:
        ctx.group, ctx.count = group, x.shape[0]
        return _gathered(x, group, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.group, ctx.count), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0] // dist.get_world_size(group)
        return _scattered(x, group, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.group, ctx.rows), None, None


class _GatherHeads(torch.autograd.Function):
    """Keys and values travel together, tokens first."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, group: Group, places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.count, ctx.rows, ctx.size = group, k.shape[2], rows, k.shape[3]
        ctx.save_for_backward(places)
        row = _gathered(torch.cat((k, v), -1).permute(2, 0, 1, 3), group, rows).index_select(0, places)
        row = row.permute(1, 2, 0, 3)
        return row[..., : ctx.size], row[..., ctx.size :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        row = torch.cat(gradients, -1).permute(2, 0, 1, 3)
        padded = row.new_zeros(dist.get_world_size(ctx.group) * ctx.rows, *row.shape[1:]).index_copy_(0, places, row)
        own = _scattered(padded, ctx.group, ctx.count).permute(1, 2, 0, 3)
        return own[..., : ctx.size], own[..., ctx.size :], None, None, None
