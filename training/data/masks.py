"""Which characters of a rendered conversation are trained.

The stop token is trained and the generation prompt is not: the loss covers what the model itself has to produce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from bestiary.training.data.errors import MaskRefused
from bestiary.training.data.layout import Layout, Range, Turn
from bestiary.training.data.messages import Message


class TrainOn(BaseModel):
    """What of a conversation is trained; a message's own `train` and `train_spans` overrule it.

    Attributes:
        turns: all assistant turns, the last one, or chosen ones counted among the assistant's turns (−1: the last).
        reasoning: whether reasoning and its tags are trained.   tool_calls: whether calls of tools are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: Literal["all", "last"] | tuple[int, ...] = "all"
    reasoning: bool = True
    tool_calls: bool = True


def chosen_turns(messages: Sequence[Message], train_on: TrainOn) -> set[int]:
    """Indexes of the messages that are trained.

    Raises:
        MaskRefused: a chosen turn that the conversation does not have.
    """
    assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if train_on.turns == "all":
        chosen = set(assistants)
    elif train_on.turns == "last":
        chosen = set(assistants[-1:])
    else:
        for turn in train_on.turns:
            if not -len(assistants) <= turn < len(assistants):
                raise MaskRefused(
                    f"turns = {list(train_on.turns)}: the conversation has {len(assistants)} assistant turns.",
                    remedy="choose turns that every sample has, or set train on the messages",
                )
        chosen = {assistants[turn] for turn in train_on.turns}
    for index in assistants:
        flag = messages[index].train
        if flag is not None:
            (chosen.add if flag else chosen.discard)(index)
    return chosen


def trained_ranges(layout: Layout, messages: Sequence[Message], train_on: TrainOn) -> list[Range]:
    """Ranges of characters that are trained, ascending, apart from each other.

    Raises:
        MaskRefused: a chosen turn that does not exist, or a span of a content that the template does not show in full.
    """
    chosen = chosen_turns(messages, train_on)
    made: list[Range] = []
    for turn in layout.turns:
        if turn.message not in chosen or turn.said is None:
            continue
        message = messages[turn.message]
        if message.train_spans is not None:
            made += _spans(turn, message)
            continue
        left_out = [] if turn.stops else [turn.parts["stop"]]
        if not train_on.reasoning and "reasoning" in turn.parts:
            left_out.append(turn.parts["reasoning"])
        if not train_on.tool_calls and "tool_calls" in turn.parts:
            left_out.append(turn.parts["tool_calls"])
        made += _without(turn.said, left_out)
    return made


def _spans(turn: Turn, message: Message) -> list[Range]:
    """A message's own spans in the rendered text; the stop token belongs to a span that reaches the content's end."""
    stripped = message.content.strip()
    lead = len(message.content) - len(message.content.lstrip())
    place = turn.parts.get("content")
    if place is None or place[1] - place[0] != len(stripped):
        raise MaskRefused(
            f"message {turn.message} has train_spans, and the template does not show its content in full.",
            remedy="train the whole message, or use another template",
        )
    made: list[Range] = []
    for start, end in sorted(message.train_spans or ()):
        begin, stop = max(start - lead, 0), min(end - lead, len(stripped))
        if begin < stop:
            made.append((place[0] + begin, place[0] + stop))
    if made and made[-1][1] == place[1] and turn.stops:
        made.append(turn.parts["stop"])
    return made


def _without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    made, at = [], whole[0]
    for start, end in sorted(holes):
        if start > at:
            made.append((at, start))
        at = max(at, end)
    if at < whole[1]:
        made.append((at, whole[1]))
    return made
