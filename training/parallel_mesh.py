"""Meshes of processes: who holds which part of the model, and who takes which data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bestiary.training.errors import ParallelRefused

REPLICATE, SHARD, CONTEXT, EXPERT, TENSOR = "replicate", "shard", "context", "expert", "tensor"
DIMS = (REPLICATE, SHARD, CONTEXT, EXPERT, TENSOR)
DATA = (REPLICATE, SHARD, EXPERT)
"""Dimensions along which ranks take different data."""


def build_mesh(
    *,
    replicate: int = 1,
    shard: int = -1,
    context: int = 1,
    expert: int = 1,
    tensor: int = 1,
    device_type: str = "cpu",
) -> DeviceMesh:
    """A mesh over all processes; ranks of one `tensor` group are neighbours, then those of one `expert` group.

    Args:
        replicate: groups that hold the whole model each.   shard: ranks that split parameters for storage (FSDP2).
        tensor: ranks that split every product, on the same data.   expert: ranks that split the experts, on data of
            their own.   context: ranks that split the tokens of each row. Parameters are split for storage over
            `shard`, `context` and `expert` together, experts over the first two.
        shard: −1 takes all processes that the others leave.   device_type: "cpu" (gloo) or "cuda" (NCCL).
    Returns:
        Dimensions "replicate", "shard", "context", "expert", "tensor", in this order.
    Raises:
        ParallelRefused: no process group, or sizes whose product is not the number of processes.
    """
    if not dist.is_initialized():
        raise ParallelRefused(
            "build_mesh() in a process that has joined no group.",
            remedy="start with torchrun and call torch.distributed.init_process_group first",
        )
    sizes = {"replicate": replicate, "shard": shard, "context": context, "expert": expert, "tensor": tensor}
    return init_device_mesh(device_type, mesh_shape(dist.get_world_size(), **sizes), mesh_dim_names=DIMS)


def mesh_shape(
    world: int, *, replicate: int, shard: int, context: int, expert: int, tensor: int
) -> tuple[int, int, int, int, int]:
    """Sizes of the dimensions that `build_mesh` gives to `world` processes.

    Raises:
        ParallelRefused: their product is not `world`.
    """
    asked = {"replicate": replicate, "tensor": tensor, "expert": expert, "context": context}
    sizes = " · ".join(f"{name} = {size}" for name, size in {**asked, "shard": shard}.items())
    for name, size in {**asked, "shard": shard}.items():
        if size < 1 and not (name == "shard" and size == -1):
            raise ParallelRefused(f"parallel.{name} = {size}.", remedy="at least 1 (shard: −1 for what is left)")
    others = prod(asked.values())
    left = world // others if shard == -1 else shard
    if left * others != world or left < 1:
        raise ParallelRefused(
            f"parallel: {sizes} does not fill {world} process(es)"
            + (f": {others} are not a divisor of it." if shard == -1 else f": the product is {others * shard}."),
            remedy="start as many processes as the product of the five, or lower one of them",
        )
    return replicate, left, context, expert, tensor


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse a mesh that `build_mesh` did not make.

    Raises:
        ParallelRefused: names its dimensions.
    """
    if mesh.mesh_dim_names != DIMS:
        raise ParallelRefused(
            f"the mesh has dimensions {mesh.mesh_dim_names}.", remedy=f"build_mesh() makes one of {DIMS}"
        )


def size(mesh: DeviceMesh, *dims: str) -> int:
    """Ranks along these dimensions."""
    return prod(mesh.size(DIMS.index(dim)) for dim in dims)


def joined(mesh: DeviceMesh, *dims: str) -> DeviceMesh:
    """Neighbouring dimensions as one; each of size 1 but one: that one as it is. Made once for a mesh."""
    wide = [dim for dim in dims if size(mesh, dim) > 1] or [dims[0]]
    if len(wide) == 1:
        return mesh[wide[0]]
    return mesh[tuple(wide)]._flatten("_".join(wide))


@dataclass(frozen=True)
class DataParallel:
    """Ranks that take different data.

    Attributes:
        rank, size: this one's place among them; ranks of one tensor or context group have the same.
        group: they, on gloo, for small values on the CPU that never queue behind gradients; None: there is one.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def largest(self, number: int) -> int:
        """The largest of the numbers of all of them; all call it."""
        if self.group is None:
            return number
        told = torch.tensor([number])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return int(told.item())


def data_parallel(mesh: DeviceMesh) -> DataParallel:
    """The data-parallel ranks of `build_mesh`'s mesh. Every process calls it, at the same place: it makes groups."""
    check_mesh(mesh)
    many = size(mesh, *DATA)
    order = [DIMS.index(dim) for dim in (*DATA, CONTEXT, TENSOR)]
    groups = mesh.mesh.permute(order).reshape(many, -1).t().tolist()  # a row for each place among ranks of one datum
    own = next(row for row in groups if dist.get_rank() in row)
    if many == 1:
        return DataParallel(0, 1, None)
    made = [dist.new_group(row, backend="gloo") for row in groups]
    return DataParallel(own.index(dist.get_rank()), many, made[groups.index(own)])
