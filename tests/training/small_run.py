"""A run at toy size, as tests of loop and checkpoints build it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestiary.models import Decoder, LoRAConfig
from bestiary.training.checkpoint import Checkpoints
from bestiary.training.config import CheckpointSection, LoopSection, OptimSection
from bestiary.training.data.batch import batch
from bestiary.training.data.encoded import encoded
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.packing import Pack
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Source
from bestiary.training.loop import Trainer
from bestiary.training.optim import Optimisers
from bestiary.training.recipes.base import Batch, LossSum

from ..models.tiny import VOCAB, tiny

STEPS, PER_STEP, LENGTH = 6, 2, 48


class Plain:
    """The sum of −log p over the trained tokens."""

    name, unit, kinds = "sft", "tokens", frozenset({"text"})

    def batch(self, pack: Pack) -> Batch:
        return dict(batch(pack))

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != -100).sum())

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        return LossSum(model(**batch, num_items_in_batch=1).loss)


def written(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """Documents of random tokens as a JSONL file; half of each is trained."""
    random = np.random.default_rng(seed)
    file = folder / f"tokens-{seed}.jsonl"
    with file.open("w") as opened:
        for _ in range(documents):
            ids = random.integers(0, VOCAB, random.integers(4, 20)).tolist()
            labels = [token if place % 2 else -100 for place, token in enumerate(ids)]
            opened.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return file


def plan(file: Path, **changes: Any) -> Plan:
    made = Plan(
        sources=(Source(name="all", files=str(file), encode=encoded),),
        pack_length=LENGTH,
        pad_id=0,
        streams=PER_STEP,
        seed=1,
    )
    return replace(made, **changes)


def trainer(
    file: Path,
    out: Path | None = None,
    *,
    family: str = "qwen3",
    dtype: torch.dtype = torch.float64,
    lora: bool = False,
    optim: OptimSection | None = None,
    loop: LoopSection | None = None,
    checkpoint: CheckpointSection | None = None,
    steps: int = STEPS,
    streams: int = PER_STEP,
    epochs: int | None = None,
    **more: Any,
) -> Trainer:
    adapters = LoRAConfig(r=2, alpha=4.0, targets=("*_proj",)) if lora else None
    model = tiny(family, dtype, lora=adapters)
    section = optim or OptimSection(lr=3e-3, warmup=2)
    recipe = Plain()
    loader = PackLoader(plan(file, streams=streams, epochs=epochs), workers=0, make=recipe.batch)
    made = Trainer(
        model=model,
        recipe=recipe,
        loader=loader,
        optimiser=Optimisers(model, section, 3e-3),
        steps=steps,
        per_step=streams,
        loop=loop or LoopSection(steps=steps),
        optim=section,
        lr=3e-3,
        **more,
    )
    if out is not None:
        bound = {"recipe": "sft", "family": family}
        made.saver = Checkpoints(out, checkpoint or CheckpointSection(every=1, keep=100), bound)
    return made


class Kept:
    """A log that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Any) -> None:
        self.rows.append((step, dict(values)))

    def of(self, name: str) -> list[float]:
        return [values[name] for _, values in self.rows if name in values]
