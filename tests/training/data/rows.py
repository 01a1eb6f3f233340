"""Small data sets whose tokens tell their row: every token of row r is 1 + r, so nothing can be lost unseen."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.training.data.encoded import encoded
from bestiary.training.data.packing import Pack
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Source

PAD = 0


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """JSON lines, compressed if the name says so; a file that is there stays, since ranks may be reading it."""
    if path.exists():
        return str(path)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return str(path)


def rows_of(lengths: Sequence[int], first: int = 0, *, valued: bool = False) -> list[dict[str, Any]]:
    """Rows with rising ids; if asked, every third with a number and a teacher's words beside its tokens."""
    made = []
    for row, length in enumerate(lengths, first):
        made.append({"id": row, "input_ids": [1 + row] * length})
        if valued and row % 3 == 0:
            widths = [1 + (row + place) % 3 for place in range(length)]
            words = {"teacher_ids": [[row + 1 + word for word in range(width)] for width in widths]}
            words |= {
                "teacher_log_probs": [
                    [-2.0 - place - word for word in range(width)] for place, width in enumerate(widths)
                ]
            }
            made[-1] |= {"value": row + 0.5} | words
    return made


def lengths(count: int, seed: int, largest: int) -> list[int]:
    """Skewed lengths from 2 on."""
    drawn = np.random.default_rng(seed).lognormal(1.5, 0.9, count)
    return [int(length) for length in np.clip(drawn, 2, largest)]


def mixed(folder: Path, **changes: Any) -> Plan:
    """Two sources, one of three files and one compressed, with ids below and above 1000."""
    web = [write(folder / f"web{i}.jsonl", rows_of(lengths(17, i, 20), first=17 * i, valued=True)) for i in range(3)]
    code = write(folder / "code.jsonl.gz", rows_of(lengths(30, 9, 20), first=1000))
    settings: dict[str, Any] = {
        "sources": (
            Source(name="web", files=web, encode=encoded, weight=2.0, block_rows=5),
            Source(name="code", files=code, encode=encoded, block_rows=8),
        ),
        "pack_length": 32,
        "pad_id": PAD,
        "seed": 3,
        "look_ahead": 6,
    }
    return Plan(**(settings | changes))


def ids_of(pack: Pack) -> list[int]:
    """The row of every document, in order."""
    return [int(pack.input_ids[start]) - 1 for start in pack.borders[: pack.documents]]


def unchanged(pack: Pack) -> Pack:
    """For `PackLoader(make=…)`: the pack itself."""
    return pack


def key(pack: Pack) -> tuple[Any, ...]:
    """Equal for packs that are equal token by token."""
    values = None if pack.values is None else pack.values.tobytes()
    said = None if pack.teacher is None else (pack.teacher.words.tobytes(), pack.teacher.log_probs.tobytes())
    return pack.input_ids.tobytes(), pack.labels.tobytes(), pack.borders.tobytes(), pack.documents, values, said
