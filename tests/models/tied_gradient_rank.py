"""What one rank of `test_tied_gradient_ranks` does: a step on its share of the batch, under each wrapper."""

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bestiary.models import Decoder

from .tiny import tiny, tokens

WORLD = 2
IDS = torch.cat((tokens(4, 6), tokens(4, 6)), dim=1)  # two rows a rank, every id at least twice
FAMILIES = ("qwen3", "gemma3")


def sharded(model: Decoder) -> nn.Module:
    """FSDP2: each block, then norm, embedding and head in one group."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": sharded}


def gradients(family: str, wrapper: str, rank: int) -> dict[str, Tensor]:
    """Whole gradients after two backward passes over this rank's rows, the mean over the ranks each."""
    model = tiny(family)
    wrapped = WRAPPERS[wrapper](model)
    mine = IDS[2 * rank : 2 * rank + 2]
    for row in mine.split(1):  # two micro-batches: the second adds to what the first left
        wrapped(row, labels=row).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[name] = gradient.full_tensor() if wrapper == "FSDP2" else gradient
    return found


def run(rank: int, store: Path) -> dict[str, dict[str, Tensor]]:
    """Every family under every wrapper."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD)
    try:
        return {f"{family} {wrapper}": gradients(family, wrapper, rank) for family in FAMILIES for wrapper in WRAPPERS}
    finally:
        gc.collect()  # wrappers lie in cycles and hold threads of the group: they go before it does
        dist.destroy_process_group()


def main(store: str) -> None:
    """Rank 1."""
    torch.set_num_threads(1)
    run(1, Path(store))
