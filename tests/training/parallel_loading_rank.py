"""What one of four ranks of `test_parallel_loading` does: loads onto meshes, saves, steps."""

import gc
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bestiary.bridges import writing
from bestiary.kernels.errors import BestiaryError
from bestiary.models import AutoDecoder, Decoder, LoRAConfig
from bestiary.models.sharding import own_part, whole
from bestiary.training.parallel import Precision, build_mesh, parallelize

from .parallel_rank import Case, mesh_of, result

WORLD = 4
LOADS = {  # by family: each mesh of four once
    "qwen3": "tensor and sharded",
    "gemma3_text": "replicated and sharded",
    "qwen3_moe": "expert and sharded",
    "gpt_oss": "tensor and expert",
}
LORA = LoRAConfig(r=4, alpha=8, targets=("*_proj*",))
CASES = tuple(
    Case(family, mesh, lora="tensor" in mesh)
    for family, meshes in {
        "qwen3": ("tensor and sharded", "replicated and sharded", "tensor and replicated"),
        "gemma3": ("context and sharded",),
        "qwen3_moe": ("tensor and expert", "expert and sharded", "context and expert"),
        "gpt_oss": ("tensor and expert", "expert and sharded", "tensor and sharded", "context and tensor"),
    }.items()
    for mesh in meshes
)


def peak_of(load: Any) -> tuple[Any, int]:
    """What `load()` gives, and by how many bytes the process grew at its largest meanwhile."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _status("VmRSS")
    made = load()
    return made, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def memory(folder: Path) -> dict[str, int]:
    """Bytes of this rank while it loads the large checkpoint in fp32, which it holds in bf16."""
    mesh = build_mesh()
    AutoDecoder.from_pretrained(folder / "qwen3", mesh=mesh)  # what is imported and compiled once is so now
    model, grown = peak_of(lambda: AutoDecoder.from_pretrained(folder / "large", mesh=mesh, dtype="float32"))
    parts = [own_part(parameter).nbytes for parameter in model.parameters()]
    return {"grown": grown, "own": sum(parts), "largest": max(parts), "all": 4 * model.num_parameters()}


def values(model: Decoder) -> dict[str, Tensor]:
    """Whole parameters by name."""
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def loaded(family: str, folder: Path) -> dict[str, Any]:
    """A checkpoint on a mesh, and what is saved from there."""
    mesh = mesh_of(LOADS[family])
    plain = AutoDecoder.from_pretrained(folder / family, mesh=mesh)
    found: dict[str, Any] = {"values": values(plain), "own": sum(own_part(p).nbytes for p in plain.parameters())}
    plain.save_pretrained(folder / f"{family}-out", max_shard_size=200_000)
    adapted = AutoDecoder.from_pretrained(
        folder / family, mesh=partial(parallelize, mesh=mesh), lora=folder / f"{family}-adapter"
    )
    found["adapted"] = values(adapted)
    adapted.save_pretrained(folder / f"{family}-adapter-out")
    adapted.save_pretrained(folder / f"{family}-merged-out", merge=True)
    torch.manual_seed(5)
    found["fresh"] = values(AutoDecoder.from_pretrained(folder / family, mesh=mesh, lora=LORA))
    return found


def failures(folder: Path) -> dict[str, str]:
    """What this rank is told when the first one cannot write."""
    narrow = Precision(compute=torch.bfloat16)
    mesh = partial(parallelize, mesh=build_mesh(), precision=narrow)
    model, found = AutoDecoder.from_pretrained(folder / "qwen3", mesh=mesh), {}
    for name, target in {"taken": folder / "qwen3", "full disk": folder / "never"}.items():
        broken = OSError("no space left") if name == "full disk" and dist.get_rank() == 0 else None
        try:
            with mock.patch.object(writing, "write_index", side_effect=broken):
                model.save_pretrained(target, max_shard_size=200_000)
        except (BestiaryError, OSError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def run(rank: int, folder: Path) -> dict[str, Any]:
    """Everything."""
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        return {
            "memory": memory(folder),
            "loaded": {family: loaded(family, folder) for family in LOADS},
            "failures": failures(folder),
            "steps": {str(case): result(case) for case in CASES},
        }
    finally:
        mesh_of.cache_clear()
        gc.collect()  # wrappers lie in cycles and hold threads of the group: they go before it does
        dist.destroy_process_group()


def main(folder: str, rank: str) -> None:
    """A rank that is not the first; what it saw goes to a file."""
    torch.set_num_threads(1)
    found = run(int(rank), Path(folder))
    torch.save({"memory": found["memory"], "failures": found["failures"]}, f"{folder}/rank{rank}.pt")
