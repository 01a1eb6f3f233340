"""A policy at toy size, and answers that it gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bestiary.models import LoRAConfig
from bestiary.training.checkpoint import Checkpoints
from bestiary.training.config import CheckpointSection, LoopSection, OptimSection
from bestiary.training.loop import Trainer
from bestiary.training.optim import Optimisers
from bestiary.training.rl.algorithms import Algorithm
from bestiary.training.rl.policy import Account, LocalPolicy, Room
from bestiary.training.rl.policy_gradient import PolicyGradient

from ...models.tiny import tiny

STEPS, RATE = 40, 3e-3


def policy(
    out: Path | None = None,
    *,
    algorithm: Algorithm | str = "grpo",
    dtype: torch.dtype = torch.float64,
    lora: bool = False,
    rate: float = RATE,
    flat: bool = False,
    loop: LoopSection | None = None,
    room: Room | None = None,
    checkpoint: CheckpointSection | None = None,
    **more: Any,
) -> LocalPolicy:
    """With resume points in `out`; `flat`: its words are nearly equally likely, so that answers differ."""
    adapters = LoRAConfig(r=2, alpha=4.0, targets=("*_proj",)) if lora else None
    model = tiny("qwen3", dtype, lora=adapters)
    if flat:
        model.lm_head.weight.data.mul_(0.05)
    section = OptimSection(lr=rate, schedule="constant", warmup=0)
    trainer = Trainer(
        model=model,
        recipe=PolicyGradient(algorithm, entropy=False),
        loader=Account(),
        optimiser=Optimisers(model, section, rate),
        steps=STEPS,
        per_step=0,
        loop=loop or LoopSection(steps=STEPS),
        optim=section,
        lr=rate,
    )
    saver = None
    if out is not None:
        kept = checkpoint or CheckpointSection(keep=100)
        saver = Checkpoints(out, kept, {"recipe": "policy_gradient"})
    return LocalPolicy(trainer, room or Room(64, 0), saver=saver, **more)


def weights(made: LocalPolicy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
