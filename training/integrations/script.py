"""What the scripts for transformers' and TRL's trainers share beside `example`: options, TRL's data, last steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bestiary.training.integrations import example

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer


def parser(script: str, about: str, *, data: str | None = None) -> argparse.ArgumentParser:
    """The command line of a script.

    Args:
        script: its file's name.   about: one line.   data: what a row of TRL's data looks like.
    """
    command = f"python -m bestiary.training.integrations.{script}"
    made = example.parser(about, command=command, data=data)
    made.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default 50)")
    made.add_argument("--bf16", action="store_true", help="compute in bfloat16; the weights stay float32")
    if data is not None:
        made.add_argument("--max-length", type=int, default=1024, help="tokens of a row that count (default 1024)")
    return made


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments that every TrainingArguments class takes."""
    return {
        "output_dir": str(given.out),
        "max_steps": given.steps,
        "save_steps": given.save_every,
        "per_device_train_batch_size": given.batch,
        "gradient_accumulation_steps": given.accumulate,
        "learning_rate": given.lr,
        "logging_steps": 1,
        "bf16": given.bf16,
        "use_cpu": not torch.accelerator.is_available(),
        "report_to": "none",
    }


def dataset(file: Path) -> Dataset:
    """The rows of a JSONL file, as TRL takes them.

    Raises:
        InvalidRow: as `example.json_lines`.
    """
    from datasets import Dataset

    return Dataset.from_list([row for _, row in example.json_lines(file)])


def finish(trainer: Trainer, given: argparse.Namespace) -> Path:
    """Train, from the newest checkpoint if `--resume` asks for it, and write `OUT/hf`; returns that folder."""
    trainer.train(resume_from_checkpoint=given.resume or None)
    result: Path = given.out / "hf"
    trainer.save_model(str(result))
    return result
