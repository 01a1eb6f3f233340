"""What one rank of `test_parallel` does: a step on its share of the batch, for each model on each mesh."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bestiary.models import Decoder, LoRAConfig
from bestiary.training.parallel import build_mesh, clip_grad_norm, data_parallel, parallelize
from tests.models.tiny import tiny, tokens

WORLD, LENGTH, BOUND = 2, 13, 0.05
IDS = tokens(WORLD, LENGTH)
STARTS = ((0, 5, 6), (0, 9))  # of the documents packed into each row
FAMILIES = ("qwen3", "gemma3", "qwen3_moe", "gpt_oss")
MESHES: dict[str, dict[str, int]] = {"sharded": {"shard": 2}, "replicated": {"replicate": 2, "shard": 1}}


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    family: str
    mesh: str
    lora: bool = False
    tied: bool = False

    def model(self) -> Decoder:
        """The same one on every rank."""
        targets = ("*_proj", "mlp.gate") if "moe" in self.family else ("*_proj",)
        lora = LoRAConfig(r=4, alpha=8, targets=targets) if self.lora else None
        return tiny(self.family, lora=lora, tie_word_embeddings=self.tied, vocab_size=206)

    def __str__(self) -> str:
        return f"{self.family}-{self.mesh}{'-lora' if self.lora else ''}{'-tied' if self.tied else ''}"


CASES = tuple(
    Case(family, mesh, lora, tied)
    for mesh in MESHES
    for family in FAMILIES
    for lora, tied in ((False, True), (True, False), (False, False))
    if not (mesh == "expert" and family in ("qwen3", "gemma3"))
)


def positions() -> Tensor:
    """(WORLD, LENGTH), restarting where a document does."""
    rows = torch.arange(LENGTH).repeat(WORLD, 1)
    for row, starts in zip(rows, STARTS, strict=True):
        for start in starts:
            row[start:] = torch.arange(LENGTH - start)
    return rows


def step(model: Decoder, rows: slice, scale: float) -> dict[str, Any]:
    """Loss and log-probabilities of these rows of the batch, the gradients left in the model."""
    out = model(IDS[rows], position_ids=positions()[rows], labels=IDS[rows], num_items_in_batch=1)
    (out.loss * scale).backward()
    return {"loss": out.loss.detach().clone(), "log_probs": out.log_probs.detach()}


def units() -> int:
    """Targets of the whole batch: every token but the first of each document."""
    return WORLD * LENGTH - sum(len(starts) for starts in STARTS)


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Whole gradients by name."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def result(case: Case) -> dict[str, Any]:
    """Of one case; what is summed over data is that of all ranks."""
    mesh = build_mesh(**MESHES[case.mesh])
    data = data_parallel(mesh)
    model = parallelize(case.model(), mesh)
    rows = slice(data.rank, data.rank + 1) if data.size > 1 else slice(None)
    found = step(model, rows, data.size / units())
    if data.group is not None:
        dist.all_reduce(found["loss"], group=data.group)
    found["gradients"] = gradients(model)
    found["norm"] = clip_grad_norm(model, BOUND)
    found["clipped"] = gradients(model)
    return found


def run(rank: int, store: Path) -> dict[str, dict[str, Any]]:
    """Every case."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD)
    try:
        return {str(case): result(case) for case in CASES}
    finally:
        gc.collect()  # wrappers lie in cycles and hold threads of the group: they go before it does
        dist.destroy_process_group()


def main(store: str) -> None:
    """A rank that is not the first."""
    torch.set_num_threads(1)
    run(1, Path(store))
