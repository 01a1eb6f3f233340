"""The processes of a run: one, or those that torchrun or accelerate started, and what lets them talk."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from bestiary.training.errors import InvalidRun

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        rank, size: of the whole run.   device: of this process.
        control, saving, data: groups of all of them on gloo, one for each use, so that none waits for another's.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    data: dist.ProcessGroup


@contextmanager
def processes(timeout_s: float) -> Iterator[Processes]:
    """All processes of the run, joined; torn down on the way out.

    The environment says who they are (RANK, WORLD_SIZE, … as torchrun sets them); without it the run is one process. A
    group that exists already is used and left alone.

    Args:
        timeout_s: after which a silent process is given up.
    Raises:
        InvalidRun: part of the environment is missing; a launcher that started one process of several.
    """
    given = [name for name in _NAMES if name in os.environ]
    if given and "WORLD_SIZE" in given and len(given) < len(_NAMES):
        missing = sorted(set(_NAMES) - set(given))
        raise InvalidRun(f"WORLD_SIZE is set and {missing[0]} is not.", remedy="start with torchrun, or unset it")
    refuse_one_of_several()
    device = _device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    mine = not dist.is_initialized()
    if mine and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    elif mine:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(3)]
        yield Processes(dist.get_rank(), dist.get_world_size(), device, *groups)
    finally:
        gc.collect()  # wrappers of a model lie in cycles and hold threads of the group: they go before it does
        if mine:
            dist.destroy_process_group()


def refuse_one_of_several() -> None:
    """On CPUs `accelerate launch --num_processes N` starts one process, and says nothing.

    Raises:
        InvalidRun: this is that one.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise InvalidRun(
            "accelerate launch was asked for several processes and started one.",
            remedy="accelerate launch --multi_gpu --num_processes N, on CPUs too; or torchrun --nproc-per-node N",
        )


def _device() -> torch.device:
    """The accelerator of this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
