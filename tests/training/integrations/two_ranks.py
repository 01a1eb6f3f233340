"""What one of two processes does for `test_two_processes`: each trainer on a model that both share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin, set_seed

from bestiary.models import AutoDecoder, Decoder
from bestiary.training.integrations import accelerate_loop, lightning_module, torchtitan_style, verl_engine
from bestiary.training.integrations.example import Steps
from bestiary.training.parallel import Style, build_mesh, parallelize, plan_of

from .sides import LORA, first_gradients, moved, rows

WORLD, STEPS, ROWS = 2, 3, 8
ENVIRONMENT = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "TORCHELASTIC_RUN_ID": "test"}
Found = dict[str, Any]
Losses = tuple[list[float], Found]


def adapted(src: Path, lora: bool, mesh: Any = None) -> Decoder:
    """The model, whole or on a mesh, with adapters that do something."""

    def spread(model: Decoder) -> None:  # two ranks cannot share 203 words evenly
        parallelize(model, mesh, plan_of(model).first(("embed_tokens", Style.WHOLE), ("lm_head", Style.WHOLE)))

    adapters = LORA if lora else None
    model = AutoDecoder.from_pretrained(src, lora=adapters, mesh=None if mesh is None else spread).train()
    moved(model)
    return model


def steps(total: int, world: int = WORLD) -> Steps:
    """Two micro-batches a step, the same rows for any number of processes."""
    return Steps(rows(), ROWS // 2 // world, 2, total)


# ---------------------------------------------------------------------- trainers


def by_accelerate(src: Path, out: Path, *, lora: bool, sharded: bool = False) -> Found:
    """A run of three steps, and one that stops after two and goes on."""

    def part(total: int, resume: bool, at: Path) -> Losses:
        accelerator = accelerator_of(sharded)
        model = adapted(src, lora)
        with first_gradients(model) as gradients:
            losses = accelerate_loop.train(
                accelerator, model, rows(), at, steps=total, batch=ROWS // WORLD // 2, accumulate=2, resume=resume
            )
        accelerate_loop.export(accelerator, model, at)
        forget()
        return losses, gradients

    return _twice(part, out)


def accelerator_of(sharded: bool) -> Accelerator:
    """For processes that hold the whole model each, or by Accelerate's own FSDP2 a part of it."""
    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False) if sharded else None
    found = Accelerator(
        cpu=True, fsdp_plugin=plugin, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    if sharded:  # Accelerate leaves it out on CPUs; everything behind this switch runs on them
        for state in (PartialState, AcceleratorState):  # the one is copied over the other whenever it is asked
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return found


def forget() -> None:
    """What Accelerate keeps for the whole process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def by_lightning(src: Path, out: Path, *, lora: bool, tensor: int = 1) -> Found:
    """ModelParallelStrategy."""
    import lightning

    class Seen(lightning.Callback):
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.found.append(float(outputs["loss"]))

    def part(total: int, resume: bool, at: Path) -> Losses:
        module = lightning_module.DecoderModule(lambda mesh: adapted(src, lora, mesh), steps(total, WORLD // tensor))
        seen = Seen()
        with first_gradients(module, "model.") as gradients:
            lightning_module.train(
                module,
                at,
                processes=WORLD,
                tensor=tensor,
                resume=resume,
                callbacks=[seen],
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        model = module.model
        assert isinstance(model, Decoder)
        model.save_pretrained(at / "hf", overwrite=True)
        return seen.found, gradients

    return _twice(part, out)


def by_torchtitan(src: Path, out: Path, *, lora: bool, tensor: int = 1) -> Found:
    """The loop in its shape."""
    job = torchtitan_style.JobConfig(str(src), dtype=torch.float64, tensor=tensor)

    def part(total: int, resume: bool, at: Path) -> Losses:
        mesh = build_mesh(tensor=tensor)
        model = adapted(src, lora, mesh)
        with first_gradients(model) as gradients:
            losses = torchtitan_style.train(model, mesh, steps(total, WORLD // tensor), at, job, resume=resume)
        model.save_pretrained(at / "hf", overwrite=True)
        return losses, gradients

    return _twice(part, out)


def by_verl(src: Path, out: Path, *, lora: bool) -> Found:
    """Its engine; its loss is that of the rows of one process."""

    def part(total: int, resume: bool, at: Path) -> Losses:
        engine = verl_engine.engine(str(src), lora=LORA.r if lora else None, dtype="fp64", steps=STEPS)
        moved(engine.module)
        with first_gradients(engine.module) as gradients:
            losses = verl_engine.train(engine, steps(total), at, resume=resume)
        engine.module.save_pretrained(at / "hf", overwrite=True)
        told = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(told)
        return [float(loss) / WORLD for loss in told], gradients

    return _twice(part, out)


def _twice(part: Callable[[int, bool, Path], Losses], out: Path) -> Found:
    losses, gradients = part(STEPS, False, out / "whole")
    early, _ = part(STEPS - 1, False, out / "parts")
    late, _ = part(STEPS, True, out / "parts")
    return {"losses": losses, "parts": early + late, "gradients": dict(gradients)}


RUNS: dict[str, Callable[..., Found]] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "torchtitan": by_torchtitan,
    "verl": by_verl,
}
CASES: dict[str, dict[str, Any]] = {
    "accelerate": {},
    "accelerate sharded": {"sharded": True},
    "lightning": {},
    "lightning tensor": {"tensor": 2},
    "torchtitan": {},
    "torchtitan tensor": {"tensor": 2},
    "verl": {},
}


# ---------------------------------------------------------------------- processes


@contextmanager
def joined(rank: int, folder: Path) -> Iterator[None]:
    """One of the two, as torchrun would have started it."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    store, patience = dist.FileStore(str(folder / "store"), WORLD), timedelta(seconds=120)  # the other one may die
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    forget()  # other tests of this process may have trained with it alone
    try:
        yield
    finally:
        forget()
        gc.collect()  # wrappers lie in cycles and hold threads of the group: they go before it does
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def run(rank: int, folder: Path) -> dict[str, Found]:
    """Every case; what this rank has."""
    found = {}
    with joined(rank, folder):
        for name, options in CASES.items():
            for lora in (False, True):
                case = f"{name}{' lora' if lora else ''}"
                found[case] = RUNS[name.split()[0]](
                    folder / "base", folder / case.replace(" ", "-"), lora=lora, **options
                )
    return found


def main(folder: str) -> None:
    """The rank that is not the first."""
    torch.set_num_threads(1)
    run(1, Path(folder))
    sys.stdout.flush()
