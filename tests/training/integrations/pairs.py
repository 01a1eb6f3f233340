"""One trainer, two models of the same file, ours and transformers': the same rows, plain SGD, and how each moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

ROWS, STEPS, RATE = 4, 2, 0.1  # rows of a step, in 1, 2 or 4 forward passes


@dataclass(frozen=True)
class Outcome:
    """What a trainer logged in each step, and what it added to each parameter that trained."""

    logged: list[Mapping[str, float]]
    moved: Mapping[str, Tensor]


def settings(out: Path, accumulate: int) -> dict[str, Any]:
    """For every TrainingArguments class."""
    return {
        "output_dir": str(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // accumulate,
        "gradient_accumulation_steps": accumulate,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }


def outcome(make: Callable[..., Trainer], model: nn.Module, args: TrainingArguments, **named: Any) -> Outcome:
    """Train `model` by the trainer that `make` builds."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = SGD(trained.values(), lr=RATE)
    trainer = make(model=model, args=args, optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)), **named)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return Outcome(logged, {name: parameter.detach() - before[name] for name, parameter in trained.items()})


def assert_moved_alike(ours: Outcome, theirs: Outcome, within: float, *, logged: tuple[str, ...] = ("loss",)) -> None:
    """Every parameter by the same amount, as a share of how far it moved, and the logs alike."""
    assert ours.moved.keys() == theirs.moved.keys()
    for name, expected in theirs.moved.items():
        assert expected.norm() > 0, f"{name} did not train"
        assert (ours.moved[name] - expected).norm() <= within * expected.norm(), name
    assert len(ours.logged) == len(theirs.logged) == STEPS
    for mine, other in zip(ours.logged, theirs.logged, strict=True):
        for figure in logged:
            assert abs(mine[figure] - other[figure]) <= 1e-5 * max(1.0, abs(other[figure])), figure
