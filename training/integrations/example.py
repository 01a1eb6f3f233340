"""What the example scripts share: their command line, rows of a JSONL file, and the batches of each optimiser step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from bestiary.kernels.errors import BestiaryError
from bestiary.models import AutoDecoder, Decoder, LoRAConfig

Row = Mapping[str, list[int]]
Batch = dict[str, Tensor]
IGNORED = -100


class InvalidRow(BestiaryError):
    """A line of the data file that is no row.

    Remedy: correct the line; a row is an object with the fields that the script's `--help` names.
    """


def parser(about: str, *, command: str, data: str | None = None) -> argparse.ArgumentParser:
    """The arguments that every script takes.

    Args:
        about: one line.   command: what starts the script, for the example in `--help`.
        data: what a row of the data looks like; None: as `read_rows` takes it.
    """
    made = argparse.ArgumentParser(
        description=about,
        epilog=f"example:\n  {command} Qwen/Qwen3-0.6B rows.jsonl --out runs/first --lora 16 --accumulate 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", help="checkpoint folder or hub id")
    row = data or '{"text": …} or {"input_ids": […], "labels": […]}'
    made.add_argument("data", type=Path, help=f"JSONL with {row} a line")
    made.add_argument("--out", type=Path, required=True, help="checkpoints of the trainer, and the result in hf/")
    made.add_argument("--steps", type=int, default=100, help="optimiser steps in all (default 100)")
    made.add_argument("--batch", type=int, default=4, help="rows of a micro-batch (default 4)")
    made.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (default 1)")
    made.add_argument("--lr", type=float, default=1e-4, help="learning rate (default 1e-4)")
    made.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank on all projections")
    made.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUT")
    return made


def adapters(rank: int | None) -> LoRAConfig | None:
    """Adapters of a rank on every projection; None: none."""
    return None if rank is None else LoRAConfig(r=rank, alpha=2 * rank, targets=("*_proj",))


def load(src: str, rank: int | None = None) -> Decoder:
    """The model to train, in float32, with fresh adapters of a rank if one is given."""
    return AutoDecoder.from_pretrained(src, dtype=torch.float32, lora=adapters(rank)).train()


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of every line of a JSONL file that is not blank.

    Lines end with a line feed alone: JSON leaves U+2028 and its like as they are inside of strings.

    Raises:
        InvalidRow: no such file, no rows, or a line that is no JSON object in UTF-8.
    """
    if not file.is_file():
        raise InvalidRow(f"data = {str(file)!r} is not a file.", remedy="a JSONL file, one row a line")
    found = False
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:  # of the encoding or of JSON
                raise InvalidRow(
                    f"line {number} is no JSON: {error}.",
                    read_from=str(file),
                    remedy="one JSON object a line, in UTF-8",
                ) from error
            if not isinstance(row, dict):
                raise InvalidRow(
                    f"line {number} is a {type(row).__name__}.", read_from=str(file), remedy="one JSON object a line"
                )
            found = True
            yield number, row
    if not found:
        raise InvalidRow("the data file has no rows.", read_from=str(file), remedy="one JSON object a line")


def read_rows(file: Path, src: str) -> list[Row]:
    """The rows of a JSONL file; text is tokenised by the checkpoint's tokenizer, and all of it is trained.

    Raises:
        InvalidRow: as `json_lines`; or a row of fewer than two tokens.
    """
    rows: list[Row] = []
    tokenizer = None
    for number, row in json_lines(file):
        if "text" in row:
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(src, trust_remote_code=False)
            row = {"input_ids": tokenizer(row["text"])["input_ids"]}
        if len(row.get("input_ids", ())) < 2:
            raise InvalidRow(
                f"line {number} has no two tokens: {str(row)[:60]}",
                read_from=str(file),
                remedy='{"text": "…"} or {"input_ids": [1, 2, 3]}, labels beside it if not all is trained',
            )
        rows.append({"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])})
    return rows


def collate(rows: Sequence[Row]) -> Batch:
    """input_ids, attention_mask and labels (rows, longest), padded on the right."""
    shape = (len(rows), max(len(row["input_ids"]) for row in rows))
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    batch["labels"].fill_(IGNORED)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][index, :length] = torch.tensor(row["input_ids"])
        batch["labels"][index, :length] = torch.tensor(row["labels"])
        batch["attention_mask"][index, :length] = 1
    return batch


def targets(batches: Sequence[Batch]) -> Tensor:
    """(): tokens that are predicted and count in the loss; what a step divides by."""
    return torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum()


@dataclass(frozen=True)
class Steps(Sequence[list[Batch]]):
    """The micro-batches of each optimiser step, a function of the step alone: to resume is to begin at another step.

    Args:
        rows: shuffled anew each time they are used up.
        batch: rows of a micro-batch.   accumulate: micro-batches of a step.   total: steps.
        rank, size: this process among those that take different data.
    """

    rows: Sequence[Row]
    batch: int
    accumulate: int
    total: int
    seed: int = 0
    rank: int = 0
    size: int = 1

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, step: int) -> list[Batch]:  # type: ignore[override]  # a step, never a slice of them
        if not 0 <= step < self.total:
            raise IndexError(step)
        each = self.batch * self.accumulate
        first = (step * self.size + self.rank) * each
        taken = [self.rows[self._index(place)] for place in range(first, first + each)]
        return [collate(taken[start : start + self.batch]) for start in range(0, each, self.batch)]

    def _index(self, place: int) -> int:
        epoch, within = divmod(place, len(self.rows))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return int(torch.randperm(len(self.rows), generator=generator)[within])
