"""What an episode starts from; imported without torch, as environments in processes of their own do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What an episode starts from.

    Attributes:
        prompt_id: name in the run: source, row and epoch. What was trained on is told by these names.
        ids: of the first turn, as the policy sees it.
        row: what the data says beside it (an answer to compare with, a start of an environment), JSON values.
    """

    prompt_id: str
    ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
