"""The folder that the pages' commands run in: a tiny checkpoint with a real tokenizer, rows, files of runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from bestiary.models import Qwen3
from tests.models.tiny import tiny_config
from tests.training.data.conftest import folder

VOCABULARY = 49152
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rows(place: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def lay_out(place: Path) -> None:
    """Writes `base`, `*.jsonl`, `run.yaml`, `pairs.yaml`, `labelled.yaml`, `LICENSE`."""
    config = tiny_config("qwen3", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24)
    config = config.with_(attention=replace(config.attention, scale=config.attention.head_dim**-0.5))
    torch.manual_seed(0)
    Qwen3(config, dtype=torch.float32).save_pretrained(place / "base")
    for name in TOKENIZER_FILES:
        shutil.copy(folder("smollm") / name, place / "base" / name)
    sums = [(f"{n} + {n}?", str(2 * n), str(2 * n + 1)) for n in range(24)]
    _rows(place, "rows.jsonl", [{"messages": [_turn("user", q), _turn("assistant", a)]} for q, a, _ in sums])
    _rows(place, "sums.jsonl", [{"prompt": q, "answer": a} for q, a, _ in sums])
    _rows(
        place,
        "pairs.jsonl",
        [
            {
                "prompt": [_turn("user", q)],
                "chosen": [_turn("assistant", a)],
                "rejected": [_turn("assistant", wrong)],
            }
            for q, a, wrong in sums
        ],
    )
    talks = [[_turn("user", q), _turn("assistant", a)] for q, a, _ in sums]
    _rows(place, "labelled.jsonl", [{"messages": talk, "label": n % 2 == 0} for n, talk in enumerate(talks)])
    for file, rows, kind in (
        ("run.yaml", "rows", "chat"),
        ("pairs.yaml", "pairs", "preference"),
        ("labelled.yaml", "labelled", "unpaired"),
    ):
        (place / file).write_text(yaml.safe_dump(run_file(rows, kind)), encoding="utf-8")
    (place / "LICENSE").write_text("Some text to compare on.\n", encoding="utf-8")


def run_file(rows: str, kind: str) -> dict[str, Any]:
    """A small run's file as a mapping."""
    return {
        "model": {"src": "base"},
        "data": {
            "tokenizer": {"src": "base"},
            "sources": [{"name": rows, "files": f"{rows}.jsonl", "kind": kind}],
            "pack_length": 128,
        },
        "loop": {"steps": 2, "workers": 0},
        "checkpoint": {"every": 1},
        "out": "runs/first",
    }
