"""Rows that hold token ids already."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bestiary.training.data.teacher import placed
from bestiary.training.data.tokens import IGNORED, Tokens


def encoded(row: Mapping[str, Any]) -> Tokens:
    """A row with `input_ids`, `labels` where not everything is trained, and `value` where it carries a number.

    With `teacher_ids` and `teacher_log_probs`, a row of them for each trained token. An `encode` for `Source`.
    """
    ids = np.asarray(row["input_ids"], np.int32)
    labels = np.asarray(row["labels"], np.int32) if "labels" in row else ids
    teacher = None
    if row.get("teacher_ids") is not None:
        trained = np.flatnonzero(labels != IGNORED)
        if not len(row["teacher_ids"]) == len(row["teacher_log_probs"]) == len(trained):
            raise ValueError(f"teacher_ids has {len(row['teacher_ids'])} rows for {len(trained)} trained tokens")
        teacher = placed(row["teacher_ids"], row["teacher_log_probs"], trained, len(ids), None, "the row")
    return Tokens(ids, labels, float(row["value"]) if row.get("value") is not None else None, teacher)


def encoded_pair(row: Mapping[str, Any]) -> tuple[Tokens, Tokens]:
    """A row with two of those, `chosen` and `rejected`."""
    return encoded(row["chosen"]), encoded(row["rejected"])
