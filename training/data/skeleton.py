"""Layouts of conversations that differ only in their texts: found once by marks, then recognised without them.

A conversation of a known form (roles, and which texts there are) is rendered once. If the render is, byte for byte, the
known text between the slots with these texts in the slots, every border lies where it lay, moved by what the texts
before it are longer. Otherwise the marks decide again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest

from bestiary.training.data.layout import Layout, Range, Turn
from bestiary.training.data.messages import Message

Form = tuple[tuple[str, bool, bool | None], ...]
Slot = tuple[int, bool]  # the message, and whether it is its reasoning
_KEPT = 512


@dataclass(frozen=True)
class _Skeleton:
    """What stands between the slots, the slots, where they lay, and the layout found by marks."""

    between: tuple[str, ...]
    slots: tuple[Slot, ...]
    places: tuple[Range, ...]
    layout: Layout


def form_of(messages: Sequence[Message]) -> Form | None:
    """The form of a conversation; None where it has more than contents and reasoning, or answers with outer spaces."""
    form = []
    for message in messages:
        if message.tool_calls or message.name is not None or message.tool_call_id is not None:
            return None
        text, thought = message.content, message.reasoning
        if message.role == "assistant" and (_spaced(text) or (thought is not None and _spaced(thought))):
            return None
        form.append((message.role, bool(text.strip()), None if thought is None else bool(thought)))
    return tuple(form)


def _spaced(text: str) -> bool:
    return bool(text) and (text[0].isspace() or text[-1].isspace())


class Skeletons:
    """The skeletons of one template."""

    def __init__(self) -> None:
        self._known: dict[tuple[Form, str | None], _Skeleton] = {}

    def recognise(self, form: Form, end_of_text: str | None, messages: Sequence[Message], plain: str) -> Layout | None:
        """The layout of a rendered conversation, or None where the marks must decide.

        Args:
            end_of_text: what may have been added where the template ends no turn.   plain: as the template renders it.
        """
        known = self._known.get((form, end_of_text))
        if known is None:
            return None
        if known.layout.added_stop:
            plain += end_of_text or ""
        full = [_text(messages, slot) for slot in known.slots]
        for texts in (full, [text.strip() for text in full]):
            if "".join(_woven(known.between, texts)) == plain:
                return _moved(known, texts, plain)
        return None

    def learn(self, form: Form, end_of_text: str | None, layout: Layout, pieces: Sequence[tuple[Slot, Range]]) -> None:
        """Keeps what marks found.

        Args:
            pieces: slots and where their texts lie.
        """
        if len(self._known) >= _KEPT or layout.cuts:
            return
        ordered = sorted(pieces, key=lambda piece: piece[1])
        places = tuple(place for _, place in ordered)
        edges = [0, *chain.from_iterable(places), len(layout.text)]
        between = tuple(layout.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
        slots = tuple(slot for slot, _ in ordered)
        self._known[form, end_of_text] = _Skeleton(between, slots, places, layout)


def _text(messages: Sequence[Message], slot: Slot) -> str:
    message = messages[slot[0]]
    return (message.reasoning or "") if slot[1] else message.content


def _woven(between: Sequence[str], texts: Sequence[str]) -> list[str]:
    return [part for pair in zip_longest(between, texts, fillvalue="") for part in pair]


def _moved(known: _Skeleton, texts: Sequence[str], plain: str) -> Layout:
    """The known layout with every border moved."""
    ends = [place[1] for place in known.places]
    grown = [0, *accumulate(len(text) - (b - a) for text, (a, b) in zip(texts, known.places, strict=True))]

    def move(at: int) -> int:
        return at + grown[bisect_right(ends, at)]

    contents: dict[int, Range] = {}
    for number, ((message, thought), text) in enumerate(zip(known.slots, texts, strict=True)):
        if not thought and _spaced(text):
            start = known.places[number][0] + grown[number]
            lead = len(text) - len(text.lstrip())
            contents[message] = (start + lead, start + lead + len(text.strip()))
    turns = []
    for turn in known.layout.turns:
        parts = {part: (move(a), move(b)) for part, (a, b) in turn.parts.items()}
        if turn.message in contents:
            parts["content"] = contents[turn.message]
        said = None if turn.said is None else (move(turn.said[0]), move(turn.said[1]))
        turns.append(Turn(turn.message, turn.role, move(turn.start), move(turn.end), said, parts, turn.stops))
    return replace(known.layout, text=plain, turns=tuple(turns))
