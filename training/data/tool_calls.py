"""What an assistant said, as a message: the inverse of what a chat template makes of content and calls of tools.

How a template writes calls is found by rendering one and looking where its parts come out, as everything about
templates here. Three forms are known, and cover what published templates do:

* an object: one JSON object with name and arguments (Qwen3, Llama 3.1)
* a header: the name in some text, then the arguments as a JSON object (harmony, DeepSeek)
* pairs: the name in some text, then each argument as a name and a value in texts (Qwen3.5, GLM 4)

Models write what they like, so reading is laxer than writing: white space in and around the fixed texts does not count,
and JSON may be spaced in any way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from bestiary.training.data.errors import TemplateRefused
from bestiary.training.data.messages import Message, Tool, ToolCall
from bestiary.training.data.template import ChatTemplate

_NAME, _KEYS, _VALUES, _TEXT, _THOUGHT = "nameofit", ("keyone", "keytwo"), ("valueone", "valuetwo"), "spoken", "thought"
_WORD = re.compile(r"[\w.\-]+")
_JSON = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer's text, read.

    Attributes:
        message: content, reasoning and calls.
        broken: an opening of a call that no call follows; what stands there is left in the content.
    """

    message: Message
    broken: bool = False


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a template writes what an assistant says, fixed texts without white space at their edges.

    Attributes:
        kind: see the module; None: the template knows no calls.
        opening: before an object, or before a name.   closing: behind the call.
        name, arguments: keys of an object.
        pair, between, value_end: of pairs: before an argument's name, between that and its value, behind the value.
        content: what stands before content where nothing was thought ("" mostly; harmony names a channel).
        reasoning, thought: before and behind reasoning; "" where the template has none.   again: what begins another
            part of an answer behind reasoning, the generation prompt.
    """

    kind: Literal["object", "header", "pairs"] | None
    opening: str = ""
    closing: str = ""
    name: str = ""
    arguments: str = ""
    pair: str = ""
    between: str = ""
    value_end: str = ""
    content: str = ""
    reasoning: str = ""
    thought: str = ""
    again: str = ""

    @classmethod
    def of(cls, template: ChatTemplate) -> CallForm:
        """By rendering.

        Raises:
            TemplateRefused: the template writes calls in no form that is known.
        """
        found = {"content": _said(template, Message(role="assistant", content=_TEXT)).split(_TEXT)[0].strip()}
        if template.facts.reasoning_field is not None:
            text = _said(template, Message(role="assistant", content=_TEXT, reasoning=_THOUGHT))
            before, shown, rest = text.partition(_THOUGHT)
            if shown:
                found |= {"reasoning": before.strip(), "thought": rest.split(_TEXT)[0].strip()}
                found["again"] = template.facts.generation_prompt.strip()
                # An empty block of reasoning is no header of content.
                if _dense(found["content"]) == _dense(found["reasoning"] + found["thought"]):
                    found["content"] = ""
        if not template.facts.tools:
            return cls(kind=None, **found)
        call = ToolCall(name=_NAME, arguments=dict(zip(_KEYS, _VALUES, strict=True)))
        text = _said(template, Message(role="assistant", tool_calls=(call,)))
        for mark in ("thought", "content"):
            if found.get(mark):
                text = text.rpartition(found[mark])[2]
        return _object(cls, text, found) or _header(cls, text, found) or _pairs(cls, text, found) or _unknown(text)

    def read(self, text: str, tools: Sequence[Tool] = ()) -> Said:
        """An answer without its stop token, as a message.

        Args:
            tools: whose described types say which values of pairs are texts; others are JSON where they can be.
        """
        reasoning, text = self._thought(text)
        if self.kind is None:
            return Said(message=self._message(text, reasoning, []))
        calls: list[ToolCall] = []
        first, at = len(text), 0
        while (opened := self._opened(text, at, bool(calls))) is not None:
            read = self._call(text, opened[1], tools)
            if read is None:
                return Said(message=self._message(text[: opened[0]] if calls else text, reasoning, calls), broken=True)
            first = min(first, opened[0])
            call, at = read
            calls.append(call)
        return Said(message=self._message(text[:first], reasoning, calls))

    def _thought(self, text: str) -> tuple[str | None, str]:
        """Reasoning, and what follows it."""
        end = self.thought
        if end and end not in text and self.reasoning and text.lstrip().startswith(self.reasoning):
            # What follows is no content, and harmony's end of reasoning names what follows.
            end = end[: end.find(">") + 1]
        if not end or end not in text:
            return None, text
        before, _, rest = text.partition(end)
        return before.strip().removeprefix(self.reasoning).strip() or None, rest.strip().removeprefix(self.again)

    def _message(self, text: str, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
        content = text.strip()
        if self.content and content.startswith(self.content):
            content = content[len(self.content) :].strip()
        return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))

    def _opened(self, text: str, at: int, again: bool) -> tuple[int, int] | None:
        """Where the next call's opening begins and ends."""
        if self.opening:
            return _find(self.opening, text, at)
        start = len(text) - len(text[at:].lstrip())
        # Bare JSON is a call at the beginning of an answer alone: further down it may be part of a text.
        return (start, start) if not again and at == 0 and text.startswith("{", start) else None

    def _call(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[ToolCall, int] | None:
        """The call that begins there, and where it ends; None: there is none."""
        if self.kind == "object":
            found = _json_at(text, at)
            if found is None or not isinstance(found[0].get(self.name), str) or not found[0][self.name]:
                return None
            name, arguments, end = found[0][self.name], found[0].get(self.arguments, {}), found[1]
            if isinstance(arguments, str):
                arguments = _object_of(arguments)
            if not isinstance(arguments, dict):
                return None
            return ToolCall(name=name, arguments=arguments), self._behind(text, end)
        word = _WORD.match(text, at + len(text[at:]) - len(text[at:].lstrip()))
        if word is None:
            return None
        if self.kind == "header":
            start = text.find("{", word.end())
            found = None if start < 0 else _json_at(text, start)
            return found and (ToolCall(name=word[0], arguments=found[0]), self._behind(text, found[1]))
        return self._of_pairs(text, word, _types(tools, word[0]))

    def _of_pairs(self, text: str, word: re.Match[str], types: Mapping[str, Any]) -> tuple[ToolCall, int] | None:
        arguments: dict[str, Any] = {}
        at = word.end()
        while (end := _find(self.closing, text, at)) is not None:
            opened = _find(self.pair, text, at)
            if opened is None or opened[0] >= end[0]:
                return ToolCall(name=word[0], arguments=arguments), end[1]
            middle = _find(self.between, text, opened[1])
            last = None if middle is None else _find(self.value_end, text, middle[1])
            if middle is None or last is None:
                return None
            name = text[opened[1] : middle[0]].strip()
            arguments[name] = _value(text[middle[1] : last[0]], types.get(name))
            at = last[1]
        return None

    def _behind(self, text: str, end: int) -> int:
        closed = _find(self.closing, text, end) if self.closing else None
        return closed[1] if closed is not None and not text[end : closed[0]].strip() else end


@lru_cache(maxsize=64)
def _lax(fixed: str) -> re.Pattern[str]:
    return re.compile(r"\s*".join(map(re.escape, fixed.split())))


def _find(fixed: str, text: str, at: int) -> tuple[int, int] | None:
    match = _lax(fixed).search(text, at)
    return match and match.span()


def _said(template: ChatTemplate, message: Message) -> str:
    """What the assistant generates of a message, without what ends it."""
    question = Message(role="user", content="a")
    text = template.render([question, message])[len(template.render([question])) :]
    _, _, said = max((text.partition(one) for one in template.facts.headers), key=lambda cut: len(cut[1]))
    said = said.rstrip()
    closer = next((one for one in template.facts.closers if said.endswith(one)), "")
    return said.removesuffix(closer)


def _dense(text: str) -> str:
    return "".join(text.split())


def _object(cls: type[CallForm], text: str, found: Mapping[str, str]) -> CallForm | None:
    for start in (match.start() for match in re.finditer("{", text[: text.find(_NAME)])):
        read = _json_at(text, start)
        if read is not None and _NAME in read[0].values():
            value, end = read
            name = next(key for key, one in value.items() if one == _NAME)
            arguments = next((key for key, one in value.items() if _KEYS[0] in str(one)), None)
            if arguments is not None:
                edges = {"opening": text[:start].strip(), "closing": text[end:].strip()}
                return cls(kind="object", name=name, arguments=arguments, **edges, **found)
    return None


def _header(cls: type[CallForm], text: str, found: Mapping[str, str]) -> CallForm | None:
    named = text.find(_NAME)
    start = text.find("{", named)
    read = None if start < 0 else _json_at(text, start)
    if read is None or _KEYS[0] not in read[0]:
        return None
    return cls(kind="header", opening=text[:named].strip(), closing=text[read[1] :].strip(), **found)


def _pairs(cls: type[CallForm], text: str, found: Mapping[str, str]) -> CallForm | None:
    marks = (_NAME, _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])
    places = [text.find(mark) for mark in marks]
    if -1 in places or places != sorted(places):
        return None
    gaps = [text[a + len(mark) : b] for (a, b), mark in zip(pairwise([*places, len(text)]), marks, strict=True)]
    before, between, after = gaps[0], gaps[1], gaps[2]
    pair = before.strip().rpartition("\n")[2]
    value_end = after.rpartition(pair)[0].strip()
    if not (pair and between.strip() and value_end and gaps[4].strip().startswith(value_end)):
        return None
    closing = gaps[4].strip()[len(value_end) :].strip()
    if not closing:
        return None
    return cls(
        kind="pairs",
        opening=text[: places[0]].strip(),
        closing=closing,
        pair=pair,
        between=between.strip(),
        value_end=value_end,
        **found,
    )


def _unknown(text: str) -> CallForm:
    raise TemplateRefused(
        f"the chat template writes calls of tools in no form that can be read back: {text!r}.",
        remedy="a parser of your own (Conversation(read=…))",
    )


def _json_at(text: str, at: int) -> tuple[dict[str, Any], int] | None:
    """The JSON object that begins there, white space left out, and its end."""
    start = len(text) - len(text[at:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) else None


def _object_of(text: str) -> Any:
    found = _json_at(text, 0)
    return text if found is None else found[0]


def _types(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """Described types of a tool's arguments."""
    for tool in tools:
        described = tool.get("function", tool)
        if described.get("name") == name:
            properties = described.get("parameters", {}).get("properties", {})
            return {key: one.get("type") for key, one in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    """A value of a pair: JSON unless its type says text, or it is none."""
    stripped = text.strip()
    if kind == "string":
        return stripped
    if kind == "boolean" and stripped in ("True", "False"):  # as templates print them
        return stripped == "True"
    try:
        return json.loads(stripped)
    except (json.JSONDecodeError, RecursionError):
        return stripped
