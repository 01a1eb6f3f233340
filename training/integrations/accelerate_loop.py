"""Hugging Face Accelerate: a plain loop over prepared objects. Extra: `accelerate`.

    accelerate launch --multi_gpu --num_processes 2 -m bestiary.training.integrations.accelerate_loop --help

`--multi_gpu` on CPUs too: without it Accelerate starts one process there, and `main` refuses to be that one.
Several processes hold the whole model each (DDP), or with `fsdp_version: 2` in Accelerate's config a part of it: the
decoder has what Accelerate's FSDP2 reads (`_no_split_modules`, `tie_weights`, `base_model_prefix`, the two embeddings).
Accelerate turns FSDP on for accelerators alone (its list of device types in `AcceleratorState.__init__`,
accelerate/state.py, lacks MULTI_CPU), so that processes on CPUs run DDP whatever the config says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from bestiary.models.sharding import is_spread
from bestiary.training.integrations.example import Batch, Row, collate, load, parser, read_rows, targets
from bestiary.training.integrations.needs import needs
from bestiary.training.processes import refuse_one_of_several

with needs("accelerate", "bestiary[accelerate]"):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed


@dataclass
class Progress:
    """Where the run stands; Accelerate saves it beside the model."""

    step: int = 0
    epoch: int = 0
    batches: int = 0  # of this epoch, already taken

    def state_dict(self) -> dict[str, int]:
        """All three."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Be what was saved."""
        self.__dict__.update(state)


def train(
    accelerator: Any,
    model: nn.Module,
    rows: list[Row],
    out: Path,
    *,
    steps: int,
    batch: int = 4,
    accumulate: int = 1,
    lr: float = 1e-4,
    resume: bool = False,
) -> list[float]:
    """Train until step `steps`, and save the state; the loss of each step that was made here.

    Args:
        accelerator: not told of `accumulate`: it would divide by the number of micro-batches. A step divides by the
            tokens of all of them on all processes, so that neither number changes a gradient.
        model: ours or transformers': all that is asked is `model(**batch, num_items_in_batch=…).loss`.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    loader: Any = DataLoader(rows, batch_size=batch, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress, losses = Progress(), []
    accelerator.register_for_checkpointing(progress)
    if resume:
        accelerator.load_state(out / "state")
    while progress.step < steps:
        loader.set_epoch(progress.epoch)
        left = accelerator.skip_first_batches(loader, progress.batches)
        for group in islice(_groups(left, accumulate), steps - progress.step):
            items = accelerator.reduce(targets(group).to(accelerator.device), "sum")
            parts = []
            for index, inputs in enumerate(group):
                last = index + 1 == len(group)
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = model(**inputs, num_items_in_batch=items).loss
                    accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
                parts.append(loss.detach())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(torch.stack(parts).sum(), "sum")))
            progress.step += 1
            progress.batches += len(group)
        if progress.batches == len(loader):
            progress.epoch, progress.batches = progress.epoch + 1, 0
    accelerator.save_state(out / "state")
    return losses


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The micro-batches of one step after the other; the last of an epoch may have fewer."""
    source = iter(batches)
    while group := list(islice(source, size)):
        yield group


def export(accelerator: Any, model: Any, out: Path) -> None:
    """Write what transformers loads (with adapters what PEFT loads) to OUT/hf; all processes call it."""
    decoder = accelerator.unwrap_model(model)
    if accelerator.is_main_process or is_spread(decoder.parameters()):
        decoder.save_pretrained(out / "hf", overwrite=True)
    accelerator.wait_for_everyone()


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    asked = parser(
        "Train a bestiary model with Accelerate.",
        command="accelerate launch --multi_gpu --num_processes 2 -m bestiary.training.integrations.accelerate_loop",
    ).parse_args(arguments)
    refuse_one_of_several()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = load(asked.model, asked.lora)
    losses = train(
        accelerator,
        model,
        read_rows(asked.data, asked.model),
        asked.out,
        steps=asked.steps,
        batch=asked.batch,
        accumulate=asked.accumulate,
        lr=asked.lr,
        resume=asked.resume,
    )
    export(accelerator, model, asked.out)
    accelerator.print("loss " + " ".join(f"{loss:.4f}" for loss in losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
