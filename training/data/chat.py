"""Conversations → token ids, loss mask and the spans of their turns, in one pass over the text.

The whole conversation is encoded once; ranges of characters become ranges of tokens by the engine's offsets. A token
that spans the end of the generation prompt does not exist when a model is served (the prompt is encoded alone), so
there the text is cut and encoded again: what is trained is what serving produces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bestiary.kernels.errors import BestiaryError
from bestiary.training.data.errors import MaskRefused
from bestiary.training.data.layout import Layout, Part, Range
from bestiary.training.data.masks import TrainOn, trained_ranges
from bestiary.training.data.messages import Message, Tool
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.data.turns import lay_out

DEFAULT = TrainOn()


class Conversation(NamedTuple):
    """What is encoded; `where` names the sample in errors."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None
    where: str = "the conversation"


@dataclass(frozen=True)
class TurnSpan:
    """One turn in tokens; ranges are [start, end).

    Attributes:
        message: its index.   role: its role.   start, end: header and all; turns lie side by side.
        said: what the assistant generates, stop token included; None for others.
        parts: kinds of text inside it.
        stops: whether the stop token is one that ends generation.
    """

    message: int
    role: str
    start: int
    end: int
    said: Range | None
    parts: dict[Part, Range]
    stops: bool


@dataclass(frozen=True)
class EncodedChat:
    """A conversation in tokens.

    Attributes:
        input_ids: (n,) int32.   loss_mask: (n,) bool, True where trained.
        turns: one a message; empty where they were not asked for.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    turns: tuple[TurnSpan, ...] = field(default=())

    def tokens(self) -> Tokens:
        """Ids and labels, as the packer takes them."""
        return Tokens(self.input_ids, np.where(self.loss_mask, self.input_ids, np.int32(IGNORED)).astype(np.int32))


class _Encoded:
    """A text's encodings, one a piece, as one row of tokens."""

    def __init__(self, text: str, cuts: Sequence[int], pieces: Sequence[Any]) -> None:
        self.text = text
        self.edges = [0, *cuts]
        self.pieces = pieces
        self.firsts = [0]
        for piece in pieces:
            self.firsts.append(self.firsts[-1] + len(piece))
        self.shift = 0

    def ids(self) -> list[int]:
        if len(self.pieces) == 1:
            found: list[int] = self.pieces[0].ids
            return found
        return [index for piece in self.pieces for index in piece.ids]

    def token_at(self, place: int) -> tuple[int, int]:
        """The first token at or behind a character: its index, and where its characters begin."""
        number = bisect_right(self.edges, place) - 1
        base, piece = self.edges[number], self.pieces[number]
        end = self.edges[number + 1] if number + 1 < len(self.edges) else len(self.text)
        while place < end:
            token = piece.char_to_token(place - base)
            if token is not None:
                return self.firsts[number] + token, base + piece.token_to_chars(token)[0]
            place += 1
        return self.firsts[number + 1], end

    def tokens_of(self, span: Range) -> Range:
        """The tokens that overlap a range of characters."""
        first, _ = self.token_at(span[0])
        last, begins = self.token_at(span[1])
        last += begins < span[1]
        return first + self.shift, max(last, first) + self.shift


def encode_chat(
    tokenizer: BaseHFModelTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    train_on: TrainOn = DEFAULT,
    neutralise: bool = True,
    where: str = "the conversation",
) -> EncodedChat:
    """One conversation with the spans of its turns, see `encode_chats`."""
    (made,) = encode_chats(
        tokenizer, [Conversation(messages, tools, where)], train_on=train_on, neutralise=neutralise, spans=True
    )
    return made


def encode_chats(
    tokenizer: BaseHFModelTokenizer,
    conversations: Sequence[Conversation],
    *,
    train_on: TrainOn = DEFAULT,
    neutralise: bool = True,
    spans: bool = False,
) -> list[EncodedChat]:
    """Conversations as tokens and loss masks.

    Args:
        neutralise: control tokens that a text spells out stay text.
        spans: fill in `turns` too.

    Raises:
        TemplateRefused: the template refuses a conversation or hides its turns.
        MaskRefused: nothing is trained, or everything. Both name the sample by its `where`.
    """
    layouts, wanted = [], []
    ender = tokenizer.hf.eos_token if isinstance(tokenizer.hf.eos_token, str) else None
    for messages, tools, where in conversations:
        try:
            layout = lay_out(tokenizer.chat, messages, tools, neutralise=neutralise, end_of_text=ender)
            wanted.append(trained_ranges(layout, messages, train_on))
        except BestiaryError as error:
            raise located(error, where) from error
        layouts.append(layout)
    encoded = _encode(tokenizer, layouts)
    made = []
    for conversation, layout, ranges, row in zip(conversations, layouts, wanted, encoded, strict=True):
        try:
            ids = tokenizer.with_bos(row.ids())
            row.shift = len(ids) - row.firsts[-1]
            mask = np.zeros(len(ids), dtype=np.bool_)
            for span in ranges:
                first, last = row.tokens_of(span)
                mask[first:last] = True
            refuse_useless(mask)
        except BestiaryError as error:
            raise located(error, conversation.where) from error
        made.append(EncodedChat(ids, mask, _turns(row, layout) if spans else ()))
    return made


def refuse_useless(mask: NDArray[np.bool_]) -> None:
    """Nothing, if a mask trains something and not everything.

    Raises:
        MaskRefused: it does not.
    """
    if not mask.any():
        raise MaskRefused(
            f"none of {len(mask)} tokens is trained.",
            remedy="choose turns that the conversation has, or leave the sample out",
        )
    if mask.all():
        raise MaskRefused(
            f"all {len(mask)} tokens are trained, the prompt too.",
            remedy="a conversation needs something that is not trained; plain text is of kind text",
        )


def located(error: BestiaryError, where: str) -> BestiaryError:
    """The same error, which also names the sample."""
    return type(error)(f"{where}: {error.what}", read_from=error.read_from, remedy=error.remedy)


def _encode(tokenizer: BaseHFModelTokenizer, layouts: Sequence[Layout]) -> list[_Encoded]:
    """Encodings, cut a second time where a token spans the end of a generation prompt."""
    cuts = [layout.cuts for layout in layouts]
    pieces = tokenizer.encode_pieces([layout.text for layout in layouts], cuts)
    made = [_Encoded(layout.text, places, row) for layout, places, row in zip(layouts, cuts, pieces, strict=True)]
    again: dict[int, list[int]] = {}
    for number, (layout, row) in enumerate(zip(layouts, made, strict=True)):
        for turn in layout.turns:
            if turn.said is not None and row.token_at(turn.said[0])[1] < turn.said[0]:
                again.setdefault(number, []).append(turn.said[0])
    if again:
        places = [sorted({*layouts[number].cuts, *more}) for number, more in again.items()]
        texts = [layouts[number].text for number in again]
        for number, text, cut, row_pieces in zip(
            again, texts, places, tokenizer.encode_pieces(texts, places), strict=True
        ):
            made[number] = _Encoded(text, cut, row_pieces)
    return made


def _turns(row: _Encoded, layout: Layout) -> tuple[TurnSpan, ...]:
    made: list[TurnSpan] = []
    for turn in layout.turns:
        _, last = row.tokens_of((turn.start, turn.end))
        made.append(
            TurnSpan(
                message=turn.message,
                role=turn.role,
                start=made[-1].end if made else 0,
                end=last,
                said=None if turn.said is None else row.tokens_of(turn.said),
                parts={part: row.tokens_of(span) for part, span in turn.parts.items()},
                stops=turn.stops,
            )
        )
    return tuple(made)
