"""Where things lie in a rendered conversation, in characters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Part = Literal["reasoning", "content", "tool_calls", "stop"]
Range = tuple[int, int]


@dataclass(frozen=True)
class Turn:
    """One message in the rendered text; ranges are [start, end) in characters.

    Attributes:
        message: its index.   role: its role.
        start, end: header and all; turns lie side by side.
        said: what the assistant generates, from the end of the generation prompt to the stop token; None for others.
        parts: the kinds of text inside `said`; for other roles only "content".
        stops: whether the token that ends the turn is one that ends generation, which is then trained.
    """

    message: int
    role: str
    start: int
    end: int
    said: Range | None
    parts: dict[Part, Range] = field(default_factory=dict)
    stops: bool = False


@dataclass(frozen=True)
class Layout:
    """A rendered conversation.

    Attributes:
        text: what is encoded.
        turns: one a message, in order.
        cuts: places where control tokens in people's texts are cut apart, so that they stay text.
        added_stop: `text` ends with a stop token that the template leaves to the next message.
    """

    text: str
    turns: tuple[Turn, ...]
    cuts: tuple[int, ...]
    added_stop: bool
