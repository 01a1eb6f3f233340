"""Rows that hold token ids already."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bestiary.training.data.tokens import Tokens


def encoded(row: Mapping[str, Any]) -> Tokens:
    """A row with `input_ids`, and `labels` where not everything is trained; an `encode` for `Source`."""
    ids = np.asarray(row["input_ids"], np.int32)
    return Tokens(ids, np.asarray(row["labels"], np.int32) if "labels" in row else ids)


def encoded_pair(row: Mapping[str, Any]) -> tuple[Tokens, Tokens]:
    """A row with two of those, `chosen` and `rejected`."""
    return encoded(row["chosen"]), encoded(row["rejected"])
