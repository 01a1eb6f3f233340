"""A head whose vocabulary is split over the ranks of a process group: each holds V_r rows of the weight, in order.

Hidden states and targets are the same on every rank. A chunk of tokens costs one all-gather of a few numbers per token;
the gradient of the hidden states is summed over the ranks once, in at least fp32. Every rank gets the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bestiary.kernels.errors import InvalidArgument


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary: ids from `start` on, of a head split over `ranks` ranks of `group`."""

    start: int
    ranks: int
    group: ProcessGroup

    def gather(self, row: Tensor) -> Tensor:
        """(1, …) of this rank → (ranks, …), the same on every rank."""
        parts = [torch.empty_like(row) for _ in range(self.ranks)]
        dist.all_gather(parts, row.contiguous(), group=self.group)
        return torch.cat(parts)

    def sum_(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)


class Local(NamedTuple):
    """Plain tensors of this rank; `shard`: how its part of the head joins the others', None where it is the whole."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    vocab_size: int
    shard: VocabShard | None


def localised(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, group: ProcessGroup | None) -> Local:
    """What this rank computes.

    Args:
        hidden: (N, H), the same on every rank, or a DTensor that is gathered first.
        weight: (V, H); with `group` this rank's (V_r, H), sizes may differ; or a DTensor split on dim 0 of one mesh
            dimension, whose group is then used. A DTensor's gradient is a DTensor placed as it is.
        bias: (V,) placed as the weight.   target: (N,) ids of the whole vocabulary.
    Raises:
        InvalidArgument: a placement that is none of these. A split weight with plain hidden states is refused: it may
            be split for storage alone (FSDP), and then each rank has tokens of its own.
    """
    if group is not None:
        hidden, weight, target = _replicated(hidden, "hidden"), _local(weight), _replicated(target, "target")
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
        mine = torch.tensor([weight.shape[0]], device=weight.device)
        dist.all_gather(list(sizes.split(1)), mine, group=group)
        counts = sizes.tolist()
        shard = VocabShard(sum(counts[: dist.get_rank(group)]), len(counts), group) if len(counts) > 1 else None
        return Local(hidden, weight, _local_or_none(bias), target, sum(counts), shard)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(weight, DTensor):
        return Local(_replicated(hidden, "hidden"), weight, bias, _replicated(target, "target"), weight.shape[0], None)
    split = [dim for dim, placement in enumerate(weight.placements) if placement == Shard(0)]
    others = [placement for placement in weight.placements if placement not in (Shard(0), Replicate())]
    if others or len(split) > 1 or (bias is not None and not isinstance(bias, DTensor)):
        raise InvalidArgument(
            f"weight is placed {weight.placements}" + ("" if bias is None else ", with a bias") + ".",
            remedy="split weight and bias on dim 0 of one mesh dimension, or replicate both",
        )
    if bias is not None and bias.placements != weight.placements:
        raise InvalidArgument(
            f"bias is placed {bias.placements}, weight {weight.placements}.", remedy="place both the same way"
        )
    if not split:
        hidden, target = _replicated(hidden, "hidden"), _replicated(target, "target")
        return Local(hidden, weight.to_local(), _local_or_none(bias), target, weight.shape[0], None)
    if not isinstance(hidden, DTensor) or hidden.device_mesh != weight.device_mesh:
        raise InvalidArgument(
            "weight is split over ranks and hidden is not a DTensor of its mesh.",
            remedy="for vocabulary parallelism replicate hidden on the mesh, or pass group=; a weight that FSDP split "
            "must be gathered first (call the module that owns it, or weight.full_tensor())",
        )
    mesh, vocab_size = weight.device_mesh, weight.shape[0]
    ranks = mesh.size(split[0])
    start = min(mesh.get_local_rank(split[0]) * -(-vocab_size // ranks), vocab_size)
    shard = VocabShard(start, ranks, mesh.get_group(split[0])) if ranks > 1 else None
    gathered = hidden.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    return Local(gathered, weight.to_local(), _local_or_none(bias), _replicated(target, "target"), vocab_size, shard)


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _local(tensor)


def _replicated(tensor: Tensor, name: str) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    if any(placement != Replicate() for placement in tensor.placements):
        raise InvalidArgument(
            f"{name} is placed {tensor.placements}, and every rank needs all of it.",
            remedy=f"{name}.redistribute(placements=[Replicate()])",
        )
    return tensor.to_local()
