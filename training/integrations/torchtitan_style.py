"""A loop in the shape of torchtitan's: one job config, a model on meta, parallelize, load, step. No extra.

    torchrun --nproc-per-node 2 -m bestiary.training.integrations.torchtitan_style --help

torchtitan's own `Trainer` takes no foreign model: every submodule must be its `Module` (`verify_module_protocol`). What
its users write themselves is here in the same order, with our parts in its places: `parallelize` for `parallelize_fn`,
the bridge for `state_dict_adapter`, documents packed into a row and told apart by positions, the loss divided by the
valid tokens of all processes, and torch's distributed checkpoint of model and optimiser, which another number of
processes reads. The metadata of that checkpoint is a pickle: resume from folders that you wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from bestiary.models import AutoDecoder, Decoder
from bestiary.training.errors import CheckpointRefused
from bestiary.training.integrations.example import Batch, Steps, adapters, parser, read_rows, targets
from bestiary.training.parallel import build_mesh, clip_grad_norm, data_parallel, parallelize
from bestiary.training.processes import processes


@dataclass(frozen=True)
class JobConfig:
    """Everything about a job.

    Attributes:
        shard: processes that split parameters (−1: all that are left).   tensor: that split every product.
        recompute: activations of a block in the backward pass.
    """

    model: str
    lora: int | None = None
    dtype: torch.dtype = torch.float32
    shard: int = -1
    tensor: int = 1
    recompute: bool = False
    lr: float = 1e-4
    max_norm: float = 1.0


def parallelize_fn(model: Decoder, *, mesh: DeviceMesh, job: JobConfig) -> None:
    """What torchtitan's does to a model on meta: activation checkpointing, compile, tensor parallel, FSDP2."""
    if job.recompute:
        model.activation_checkpointing_enable()
    parallelize(model, mesh)


def build(job: JobConfig, mesh: DeviceMesh) -> Decoder:
    """The model on its mesh: made on meta, spread, allocated; then each process reads its slices of the checkpoint."""
    spread = partial(parallelize_fn, mesh=mesh, job=job)
    return AutoDecoder.from_pretrained(job.model, dtype=job.dtype, lora=adapters(job.lora), mesh=spread).train()


class TrainState:
    """Model, optimiser and step for the distributed checkpoint; frozen weights are the base's and left out."""

    options = StateDictOptions(ignore_frozen_params=True, strict=False)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """The shards of this process, by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put shards where they belong."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )
        self.step = state["step"]


def packed(batch: Batch) -> Batch:
    """The rows of a padded batch behind one another in one row, positions counted anew in each."""
    real = batch["attention_mask"].bool()
    labels = batch["labels"].clone()
    labels[:, 0] = -100  # nothing before it predicts it
    positions = real.cumsum(-1) - 1
    fields = {"input_ids": batch["input_ids"], "position_ids": positions, "labels": labels}
    return {name: value[real][None] for name, value in fields.items()}


def newest(out: Path) -> Path:
    """The last complete checkpoint in a folder.

    Raises:
        CheckpointRefused: there is none.
    """
    found = [file.parent for file in out.glob("step-*/.metadata")]  # written last
    if not found:
        raise CheckpointRefused(f"no checkpoint in {out}.", remedy="start without --resume")
    return max(found, key=lambda folder: int(folder.name.removeprefix("step-")))


def train(
    model: nn.Module, mesh: DeviceMesh, steps: Steps, out: Path, job: JobConfig, *, resume: bool = False
) -> list[float]:
    """Train until the last of `steps` and write a checkpoint; the loss of each step that was made here.

    Args:
        model: ours or transformers', on `mesh`.
        steps: of all processes; each takes its share.
    """
    data = data_parallel(mesh)
    steps = replace(steps, rank=data.rank, size=data.size)
    device = next(model.parameters()).device

    def everywhere(value: Tensor) -> Tensor:
        """Summed over the processes that take different data."""
        told = value.detach().cpu()
        if data.group is not None:
            dist.all_reduce(told, group=data.group)
        return told.to(device)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=job.lr)
    state, losses = TrainState(model, optimizer), []
    if resume:
        state_dict_loader.load({"train": state}, checkpoint_id=newest(out))
    for step in range(state.step, len(steps)):
        batches = steps[step]
        valid_tokens, parts = everywhere(targets(batches)), []
        for batch in batches:
            inputs = {name: value.to(device) for name, value in packed(batch).items()}
            loss = model(**inputs, num_items_in_batch=valid_tokens).loss
            (loss * data.size).backward()  # gradients are averaged over these processes
            parts.append(loss.detach())
        clip_grad_norm(model, job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(everywhere(torch.stack(parts).sum())))
        state.step = step + 1
    state_dict_saver.save({"train": state}, checkpoint_id=out / f"step-{state.step}")
    return losses


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    commands = parser(
        "Train a bestiary model in a loop like torchtitan's.",
        command="torchrun --nproc-per-node 2 -m bestiary.training.integrations.torchtitan_style",
    )
    commands.add_argument("--shard", type=int, default=-1, help="processes that split parameters (default: the rest)")
    commands.add_argument("--tensor", type=int, default=1, help="processes that split every product (default 1)")
    commands.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    asked = commands.parse_args(arguments)
    job = JobConfig(
        asked.model, lora=asked.lora, shard=asked.shard, tensor=asked.tensor, recompute=asked.recompute, lr=asked.lr
    )
    with processes(timeout_s=600) as group:
        torch.manual_seed(0)
        mesh = build_mesh(shard=job.shard, tensor=job.tensor, device_type=group.device.type)
        model = build(job, mesh)
        steps = Steps(read_rows(asked.data, asked.model), asked.batch, asked.accumulate, asked.steps)
        losses = train(model, mesh, steps, asked.out, job, resume=asked.resume)
        model.save_pretrained(asked.out / "hf", overwrite=True)  # all processes call it
        if group.rank == 0:
            print("loss " + " ".join(f"{loss:.4f}" for loss in losses))  # noqa: T201
        del model  # its wrappers hold threads of the group


if __name__ == "__main__":
    main()
