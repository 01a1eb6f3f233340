"""Parameters that lie in parts on several processes: which part is here, and all of it together.

DTensor and FSDP are imported where they are asked about: importing the models does without them, in half the time.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Box = tuple[slice, ...]


def own_part(parameter: Tensor) -> Tensor:
    """What of a parameter is here, as a plain tensor on the same memory; all of it if it is no DTensor."""
    from torch.distributed.tensor import DTensor

    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def own_box(parameter: Tensor) -> Box:
    """Where `own_part` lies in the parameter: one slice (step 1) an axis."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size, 1) for size in parameter.shape)
    shape, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size, 1) for start, size in zip(first, shape, strict=True))


def kept(model: nn.Module) -> nn.Module:
    """The model with every parameter as it is kept: what FSDP2 has gathered is let go.

    After a pass without a backward one the root's groups stay gathered, in the dtype of the computation: read then they
    would be narrower than what trains. Whoever reads parameters for a checkpoint, an export or a sync begins here.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, what FSDP2 gathers for a forward pass stays: of many passes without gradients only the first one gathers.

    Each process then holds all parameters in the dtype of the computation.
    """
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    known = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:  # what set_reshard_after_forward(False) writes, without forgetting what was there
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, info in zip(groups, known, strict=True):
            group.post_forward_mesh_info = info
        kept(model)


def is_spread(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them lies in parts; then `whole` is a call that all processes make together."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in parameters)


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, gathered where it lies in parts, without a graph. All processes call it in one order."""
    from torch.distributed.tensor import DTensor, Replicate

    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter
    for dim in range(parameter.device_mesh.ndim):  # one after the other: torch warns where it has to decide so itself
        placements = (Replicate(),) * (dim + 1) + tuple(parameter.placements[dim + 1 :])
        parameter = parameter.redistribute(placements=placements)
    return parameter.to_local()


@torch.no_grad()
def put(parameter: Tensor, value: Tensor) -> None:
    """Write `value`, all of it, into `parameter`, of which each process keeps its part."""
    own_part(parameter).copy_(value[own_box(parameter)])
