"""Where each turn of a rendered conversation lies, in characters.

A conversation is rendered twice: as it is, and with a private-use character in the middle of every text. Without these
marks both renders must be equal, byte for byte; then the marks say where each text came out. The middle, because
templates trim ends and look at beginnings. Before an assistant's texts stands its header (found as the
generation prompt), behind them its end (the first closing control token).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bestiary.training.data.errors import TemplateRefused
from bestiary.training.data.layout import Layout, Part, Range, Turn
from bestiary.training.data.messages import Message, Tool
from bestiary.training.data.skeleton import form_of
from bestiary.training.data.template import ChatTemplate, changed_texts

_FIRST = 0xF0000  # of a plane for private use: 65 534 marks
_CUT = "\U0010fffd"
_MARKS = re.compile("[\U000f0000-\U000ffffd\U0010fffd]")
_SHOWN = {"reasoning", "content", "call"}


@dataclass
class _Piece:
    message: int
    kind: str
    text: str
    middle: int
    span: Range | None = None


class _Marks:
    """Puts marks into texts and remembers which mark stands for which text."""

    def __init__(self, control: re.Pattern[str] | None) -> None:
        self.pieces: list[_Piece] = []
        self.message = 0
        self.cut = False
        self._control = control

    def __call__(self, kind: str, text: str, *, shown: bool = True) -> str:
        marked = text
        if self._control is not None and (matches := [match.start() + 1 for match in self._control.finditer(text)]):
            self.cut = True
            for at in reversed(matches):
                marked = marked[:at] + _CUT + marked[at:]
        stripped = text.strip()
        if kind not in _SHOWN or not shown or not stripped:
            return marked
        if len(self.pieces) >= 0xFFFD:
            raise TemplateRefused(f"a conversation with more than {0xFFFD} texts cannot be marked.")
        lead = len(text) - len(text.lstrip())
        middle = len(stripped) // 2
        place = lead + middle
        if marked is not text:  # the cuts before this place moved it
            place += sum(at <= place for at in matches)
        self.pieces.append(_Piece(self.message, kind, stripped, middle))
        return marked[:place] + chr(_FIRST + len(self.pieces) - 1) + marked[place:]


def lay_out(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    neutralise: bool = True,
    end_of_text: str | None = None,
) -> Layout:
    """The rendered conversation and where its turns lie.

    Args:
        neutralise: cut control tokens in people's texts apart.
        end_of_text: the token to add where the template does not end the last turn.

    Raises:
        TemplateRefused: the template refuses the messages, changes with the marks, hides a turn, or the messages use
            private-use characters or reasoning that the template cannot show.
    """
    plain = template.render(messages, tools)
    form = None if tools else form_of(messages)
    if form is not None and not (neutralise and _spells_control(template, messages)):
        if known := template.skeletons.recognise(form, end_of_text, messages, plain):
            return known
    if _MARKS.search(plain):
        raise TemplateRefused(
            f"the texts hold {_MARKS.search(plain)[0]!r}, a character of the planes for private use.",  # type: ignore[index]
            remedy="remove characters from U+F0000 on",
        )
    control = template.control if neutralise else None
    for shown in (frozenset({"system", "developer", "user", "assistant", "tool"}), frozenset({"assistant"})):
        marks = _Marks(control)
        marked = _render_marked(template, messages, tools, marks, shown)
        if _MARKS.sub("", marked) == plain:
            break
    else:
        raise TemplateRefused(
            "the chat template renders other text when a text in it gets a mark: turns cannot be found.",
            remedy="remove the text that the template treats specially, or use another template",
        )
    cuts = _locate(plain, marked, marks.pieces)
    _check_tools(plain, messages, tools, marks.pieces)
    layout = _walk(template, messages, plain, marks.pieces, cuts, end_of_text)
    if form is not None and all(one.content == one.content.strip() for one in messages) and "user" in shown:
        pieces = [((one.message, one.kind == "reasoning"), one.span) for one in marks.pieces if one.span]
        if all(one.span is None or one.span[1] - one.span[0] == len(one.text) for one in marks.pieces):
            template.skeletons.learn(form, end_of_text, layout, pieces)
    return layout


def _spells_control(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    search = template.control.search
    return any(search(one.content) or (one.reasoning and search(one.reasoning)) for one in messages)


def cut_places(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, prompt: bool = False
) -> tuple[str, tuple[int, ...]]:
    """The rendered text, and the places where control tokens in people's texts are to be cut apart.

    Raises:
        TemplateRefused: the template refuses the messages, or changes with the cuts.
    """
    plain = template.render(messages, tools, prompt=prompt)
    marks = _Marks(template.control)
    marked = _render_marked(template, messages, tools, marks, frozenset(), prompt=prompt)
    if not marks.cut:
        return plain, ()
    if _MARKS.sub("", marked) != plain:
        raise TemplateRefused(
            "the chat template renders other text when a control token in a text is cut apart.",
            remedy="remove control tokens from the texts, or pass neutralise=False",
        )
    return plain, _locate(plain, marked, marks.pieces)


def _render_marked(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    marks: _Marks,
    shown: frozenset[str],
    *,
    prompt: bool = False,
) -> str:
    made: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        marks.message = index
        mark = marks if message.role in shown else lambda kind, text: marks(kind, text, shown=False)
        made.append(template.as_dict(message, mark))
    marked_tools = (
        None if tools is None else [changed_texts(tool, lambda _kind, text: marks("tool", text)) for tool in tools]
    )
    return template.render_dicts(made, marked_tools, prompt=prompt)


def _locate(plain: str, marked: str, pieces: list[_Piece]) -> tuple[int, ...]:
    """Fills in the spans of the pieces; returns the cuts."""
    cuts: list[int] = []
    for before, match in enumerate(_MARKS.finditer(marked)):
        place, mark = match.start() - before, match[0]
        if mark == _CUT:
            cuts.append(place)
            continue
        piece = pieces[ord(mark) - _FIRST]
        if piece.span is not None:  # a text that is shown again, as a tool's name in its result
            continue
        start = place - piece.middle
        if start >= 0 and plain.startswith(piece.text, start):
            piece.span = (start, start + len(piece.text))
        else:
            piece.span = _common(plain, place, piece)
    return tuple(sorted(set(cuts)))


def _common(plain: str, place: int, piece: _Piece) -> Range:
    """What of the piece is shown around its mark, where the template leaves out or changes the rest."""
    left, right = 0, 0
    while left < min(piece.middle, place) and plain[place - left - 1] == piece.text[piece.middle - left - 1]:
        left += 1
    limit = min(len(piece.text) - piece.middle, len(plain) - place)
    while right < limit and plain[place + right] == piece.text[piece.middle + right]:
        right += 1
    return place - left, place + right


def _walk(
    template: ChatTemplate,
    messages: Sequence[Message],
    plain: str,
    pieces: Sequence[_Piece],
    cuts: tuple[int, ...],
    end_of_text: str | None,
) -> Layout:
    facts = template.facts
    shown: list[list[_Piece]] = [[] for _ in messages]
    for piece in pieces:
        if piece.span is not None:
            shown[piece.message].append(piece)
    closing = re.compile("|".join(map(re.escape, sorted(facts.closers, key=len, reverse=True))))
    turns: list[Turn] = []
    at, added = 0, False
    for index, message in enumerate(messages):
        spans = [piece.span for piece in shown[index] if piece.span]
        following = next((min(p.span[0] for p in later if p.span) for later in shown[index + 1 :] if later), len(plain))
        if message.role != "assistant":
            last = max([at, *(span[1] for span in spans)])
            nearest = index + 1 < len(messages) and bool(shown[index + 1])
            end = _end_of_other(template, messages, index, plain, last, following, nearest)
            parts: dict[Part, Range] = {"content": spans[0]} if spans else {}
            turns.append(Turn(index, message.role, at, end, None, parts))
            at = end
            continue
        first = min((span[0] for span in spans), default=following)
        header, begin = _header(template, plain, at, first, index, nearest=bool(spans))
        _check_reasoning(template, message, shown[index], plain[header:begin])
        last = max([begin, *(span[1] for span in spans)])
        final = index == len(messages) - 1
        found = closing.finditer(plain, last, following)
        match = next((one for one in found if one.start() + 1 not in cuts), None)
        if match is None and final and not facts.closes_last_turn and end_of_text is not None:
            plain, added = plain + end_of_text, True
            match = closing.search(plain, last) or re.compile(re.escape(end_of_text)).search(plain, last)
        if match is None:
            raise TemplateRefused(
                f"message {index}: the assistant's turn is not ended by any of {', '.join(sorted(facts.closers))}.",
                remedy="use the template that belongs to this tokenizer",
            )
        stop = (match.start(), match.end())
        stops = match[0] in facts.stops or (added and final)
        parts = _parts(template, message, shown[index], plain, begin, stop)
        # Where the next role's token is the stop, that token belongs to this turn's loss and to the next turn's text.
        end = stop[1] if facts.closes_last_turn or (added and final) else stop[0]
        while end < len(plain) and plain[end].isspace() and end < following:
            end += 1
        turns.append(Turn(index, message.role, at, end, (begin, stop[1]), parts, stops))
        at = end
    if turns and at < len(plain):
        last_turn = turns[-1]
        turns[-1] = replace(last_turn, end=len(plain))
    return Layout(plain, tuple(turns), cuts, added)


def _header(template: ChatTemplate, plain: str, at: int, until: int, index: int, *, nearest: bool) -> Range:
    """Where the header of an assistant's turn begins and ends: the last before its first text, else the first."""
    search = plain.rfind if nearest else plain.find
    for header in template.facts.headers:
        found = search(header, at, until)
        if found >= 0:
            return found, found + len(header)
    raise TemplateRefused(
        f"message {index}: the assistant's turn does not begin with {template.facts.headers[-1]!r}.",
        remedy="use the template that belongs to this tokenizer; the first assistant's turn may need a user before it",
    )


def _check_reasoning(template: ChatTemplate, message: Message, shown: Sequence[_Piece], header: str) -> None:
    facts = template.facts
    if message.reasoning is None:
        return
    if facts.reasoning_field is None:
        raise TemplateRefused(
            "the message has reasoning and the chat template has no place for it.",
            remedy="drop the reasoning (reasoning: drop), or use a template of a reasoning model",
        )
    if header != facts.generation_prompt and any(piece.kind == "reasoning" for piece in shown):
        raise TemplateRefused(
            f"the message has reasoning, and the generation prompt {facts.generation_prompt!r} says there is none.",
            remedy="set enable_thinking to true, or drop the reasoning",
        )


def _check_tools(
    plain: str, messages: Sequence[Message], tools: Sequence[Tool] | None, pieces: Sequence[_Piece]
) -> None:
    """Refuses what a template would leave out without a word: calls, and descriptions of tools."""
    shown = {piece.message for piece in pieces if piece.kind == "call" and piece.span is not None}
    lost = [
        f"message {index} calls a tool" for index, one in enumerate(messages) if one.tool_calls and index not in shown
    ]
    names = [str(tool.get("function", tool).get("name", "")) for tool in tools or ()]
    lost += [f"the tool {name!r} is given" for name in names if name and name not in plain]
    if lost:
        raise TemplateRefused(
            f"{lost[0]}, and the chat template does not show it.",
            remedy="use a template that knows tools, or write the calls into the content",
        )


def _end_of_other(
    template: ChatTemplate,
    messages: Sequence[Message],
    index: int,
    plain: str,
    last: int,
    following: int,
    nearest: bool,
) -> int:
    """Where a turn ends that is not an assistant's: at the next assistant's header, else behind its control token."""
    if index + 1 == len(messages):
        return len(plain)
    if messages[index + 1].role == "assistant":
        return _header(template, plain, last, following, index + 1, nearest=nearest)[0]
    match = template.control.search(plain, last, following)
    end = match.end() if match else last
    while match and end < following and plain[end].isspace():
        end += 1
    return end


def _parts(
    template: ChatTemplate, message: Message, shown: Sequence[_Piece], plain: str, begin: int, stop: Range
) -> dict[Part, Range]:
    """The parts of what an assistant says; reasoning covers its tags, tool calls everything behind the content."""
    facts = template.facts
    by_kind: dict[str, Range] = {}
    for piece in shown:
        if piece.span is not None:
            by_kind.setdefault(piece.kind, piece.span)
    parts: dict[Part, Range] = {}
    content = by_kind.get("content")
    rest = content[0] if content else by_kind["call"][0] if "call" in by_kind else stop[0]
    opening = facts.reasoning_opening.strip()
    if "reasoning" in by_kind or (opening and plain.startswith(opening, begin, rest)):
        # Harmony speaks again after its reasoning: <|end|><|start|>assistant stands between, and is generated too.
        after = by_kind["reasoning"][1] if "reasoning" in by_kind else begin + len(opening)
        again = plain.find(facts.generation_prompt, after, rest)
        end = again + len(facts.generation_prompt) if again >= 0 else rest
        if "call" in by_kind and content is None and again < 0:
            end = min(end, _before_call(plain, after, rest))
        parts["reasoning"] = (begin, end)
    if content is not None:
        parts["content"] = content
    if message.tool_calls and "call" in by_kind:
        begin_calls = content[1] if content else parts["reasoning"][1] if "reasoning" in parts else begin
        parts["tool_calls"] = (begin_calls, stop[0])
    parts["stop"] = stop
    return parts


def _before_call(plain: str, after: int, call: int) -> int:
    """Where reasoning's closing tag ends: behind the last empty line before the call's own opening."""
    gap = plain.rfind("\n\n", after, call)
    return gap + 2 if gap >= 0 else call
