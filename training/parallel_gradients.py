"""Norm and clipping of gradients that lie in parts on several meshes."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from bestiary.kernels.precision import at_least_fp32

CLIP_EPS = 1e-6
"""Added to the norm before it divides, as in `torch.nn.utils.clip_grad_norm_`."""


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`; returns the norm before.

    Every element of a split gradient counts once, whichever mesh it is split over, and a replicated one once. All
    ranks get the same bits. Squares are summed in at least fp32; one all-reduce for each mesh dimension.

    Args:
        max_norm: None: only measure.
    Returns:
        () in at least fp32; inf or nan where a gradient is, and then gradients are as useless as before.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    split: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        split[_groups(gradient)].append(_local(gradient))
    if not gradients:
        return torch.zeros(())
    total: Tensor | None = None
    for groups, parts in split.items():
        wide = at_least_fp32(parts[0].dtype)
        norms = torch.stack(
            [torch.linalg.vector_norm(part, dtype=at_least_fp32(part.dtype)).to(wide) for part in parts]
        )
        square = norms.square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = square if total is None else total + square
    assert total is not None
    norm = total.sqrt()
    if max_norm is not None:
        factor = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        for parts in split.values():
            for part in parts:
                part.mul_(factor.to(part.dtype))
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which its parts are spread."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    spread = [dim for dim, placement in enumerate(gradient.placements) if placement != Replicate()]
    return tuple(mesh.get_group(dim) for dim in spread if mesh.size(dim) > 1)
