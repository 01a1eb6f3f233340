"""Rows that hold token ids already."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bestiary.training.data.tokens import Tokens


def encoded(row: Mapping[str, Any]) -> Tokens:
    """A row with `input_ids`, `labels` where not everything is trained, and `value` where it carries a number.

    An `encode` for `Source`.
    """
    ids = np.asarray(row["input_ids"], np.int32)
    labels = np.asarray(row["labels"], np.int32) if "labels" in row else ids
    return Tokens(ids, labels, float(row["value"]) if row.get("value") is not None else None)


def encoded_pair(row: Mapping[str, Any]) -> tuple[Tokens, Tokens]:
    """A row with two of those, `chosen` and `rejected`."""
    return encoded(row["chosen"]), encoded(row["rejected"])
