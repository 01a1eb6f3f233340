"""Lightning: the decoder in a LightningModule, on one device or spread by `ModelParallelStrategy`. Extra: `lightning`.

    python -m bestiary.training.integrations.lightning_module --help

`configure_model` is where Lightning wants a model to be built and spread: `from_pretrained(mesh=…)` builds it on meta,
`parallelize` (FSDP2, tensor parallel) spreads it before a weight is read, and no process ever holds all of it. On GPUs
as on CPUs (gloo); the strategy starts the processes itself, or torchrun does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bestiary.models import AutoDecoder, Decoder
from bestiary.training.integrations.example import Batch, Steps, adapters, parser, read_rows, targets
from bestiary.training.integrations.needs import needs
from bestiary.training.parallel import DataParallel, build_mesh, clip_grad_norm, data_parallel

with needs("lightning", "bestiary[lightning]"):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

Build = Callable[[DeviceMesh | None], nn.Module]


class Stream:
    """`Steps` as Lightning takes them: it saves and restores whatever has these two methods."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.next = steps, 0

    def __iter__(self) -> Iterator[list[Batch]]:
        while self.next < len(self.steps):
            self.next += 1
            yield self.steps[self.next - 1]

    def __len__(self) -> int:
        """One epoch without an end: `max_steps` ends the run, and a longer one can go on from it."""
        return sys.maxsize

    def state_dict(self) -> dict[str, int]:
        """The step that comes next."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.next = state["next"]


class DecoderModule(lightning.LightningModule):
    """A model and the step that trains it. Its batches are whole optimiser steps: lists of micro-batches.

    The step is manual, since Lightning's `accumulate_grad_batches` averages the means of micro-batches. Here the sum is
    divided by the tokens of all of them on all processes, so that neither number changes a gradient.

    Args:
        build: makes the model, spread over the mesh that it is given (None: one process).
        steps: of all processes; each takes its share.
    """

    def __init__(self, build: Build, steps: Steps, *, lr: float = 1e-4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.build, self.steps, self.lr = build, steps, lr
        self.model: nn.Module | None = None
        self.data = DataParallel(rank=0, size=1, group=None)

    def configure_model(self) -> None:
        """Build the model where it will train; Lightning calls it once its processes are joined."""
        if self.model is not None:
            return
        mesh = None
        if self.device_mesh is not None:  # of ModelParallelStrategy, which knows two of our four dimensions
            shard, tensor = (self.device_mesh[name].size() for name in ("data_parallel", "tensor_parallel"))
            mesh = build_mesh(shard=shard, tensor=tensor, device_type=self.device_mesh.device_type)
            self.data = data_parallel(mesh)
        self.model = self.build(mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what trains."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def train_dataloader(self) -> Stream:
        """This process's share of the steps."""
        return Stream(replace(self.steps, rank=self.data.rank, size=self.data.size))

    def training_step(self, batches: list[Batch], index: int) -> Tensor:
        """One optimiser step; its loss."""
        assert self.model is not None
        optimizer: Any = self.optimizers()
        items, parts = self._sum(targets(batches)), []
        for batch in batches:
            loss = self.model(**batch, num_items_in_batch=items).loss
            self.manual_backward(loss * self.data.size)  # gradients are averaged over processes
            parts.append(loss.detach())
        clip_grad_norm(self.model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = self._sum(torch.stack(parts).sum())
        self.log("loss", whole, prog_bar=True)
        return whole

    def _sum(self, value: Tensor) -> Tensor:
        """Over the processes that take different data."""
        told = value.cpu()
        if self.data.group is not None:
            dist.all_reduce(told, group=self.data.group)
        return told.to(self.device)


def build(src: str, rank: int | None, mesh: DeviceMesh | None) -> Decoder:
    """The model in float32, on a mesh if one is given, with adapters of a rank."""
    return AutoDecoder.from_pretrained(src, dtype=torch.float32, lora=adapters(rank), mesh=mesh).train()


def train(
    module: DecoderModule,
    out: Path,
    *,
    processes: int = 1,
    tensor: int = 1,
    resume: bool = False,
    callbacks: Sequence[lightning.Callback] = (),
    **options: Any,
) -> None:
    """Fit until the module's last step, with a checkpoint in OUT/checkpoints at the end.

    Args:
        processes: on which the model is spread; `tensor` of them split every product, the rest parameters (FSDP2).
        callbacks, options: of `lightning.Trainer`.
    """
    last, many = out / "checkpoints" / "last.ckpt", len(module.steps)
    strategy: Any = "auto"
    if processes > 1:
        strategy = ModelParallelStrategy(data_parallel_size=processes // tensor, tensor_parallel_size=tensor)
    save = ModelCheckpoint(last.parent, filename=last.stem, every_n_train_steps=many, enable_version_counter=False)
    trainer = lightning.Trainer(
        max_steps=many,
        strategy=strategy,
        devices=processes,
        use_distributed_sampler=False,
        logger=False,
        callbacks=[save, *callbacks],
        **options,
    )
    trainer.fit(module, ckpt_path=last if resume else None)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    commands = parser(
        "Train a bestiary model with Lightning.", command="python -m bestiary.training.integrations.lightning_module"
    )
    commands.add_argument("--processes", type=int, default=1, help="spread the model over so many (default 1)")
    commands.add_argument("--tensor", type=int, default=1, help="of them split every product (default 1)")
    asked = commands.parse_args(arguments)
    lightning.seed_everything(0)
    steps = Steps(read_rows(asked.data, asked.model), asked.batch, asked.accumulate, asked.steps)
    module = DecoderModule(partial(build, asked.model, asked.lora), steps, lr=asked.lr)
    train(module, asked.out, processes=asked.processes, tensor=asked.tensor, resume=asked.resume)
    assert isinstance(module.model, Decoder)
    module.model.save_pretrained(asked.out / "hf", overwrite=True)  # all processes call it


if __name__ == "__main__":
    main()
