"""A chat template as a function of messages: frozen arguments, rendering, and what probing it shows.

Nothing here compares template strings. What a template does is found by rendering small conversations whose texts carry
marks (private-use characters) and looking where the marks come out.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from pydantic import BaseModel, ConfigDict, Field

from bestiary.training.data.errors import TemplateRefused
from bestiary.training.data.messages import Message, Tool, ToolCall
from bestiary.training.data.sandbox import compiled
from bestiary.training.data.skeleton import Skeletons

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MARK = "\U000f0000"
_PROBE = "\U000f0001"


class TemplateArguments(BaseModel):
    """What a template reads beside the messages, fixed for a run and part of the fingerprint.

    Attributes:
        enable_thinking: thinking mode of templates that have one; None leaves it out.
        date: what templates that print the date print; without it such a template is refused, as its ids change daily.
        reasoning_effort: of harmony.
        more: any other variable of the template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_thinking: bool | None = None
    date: datetime.date | None = None
    reasoning_effort: str | None = None
    more: dict[str, str | int | float | bool] = Field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """The variables that were set, without the date."""
        named = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        return {name: value for name, value in named.items() if value is not None} | self.more


@dataclass(frozen=True)
class TemplateFacts:
    """What probing a template shows.

    Attributes:
        generation_prompt: what asks the assistant to speak.
        headers: beginnings of an assistant's turn, the longest first; each is a beginning of `generation_prompt`.
        reasoning_field: the message field that the template takes reasoning from; None if it takes none.
        reasoning_opening: what stands before reasoning, "" without it.
        stops: control tokens that end what the assistant says, as the template renders its last turn.
        closers: `stops` and what stands after an assistant's turn in the history (harmony: <|end|>).
        closes_last_turn: False where the last turn ends with nothing and the next role's token is the stop.
        tools: whether calls and results of tools are rendered.
        system: whether a system message is rendered.
        prefix_by_turn: for three assistant turns, whether what serving renders as the prompt of that turn is a prefix
            of the whole conversation as rendered for training.
    """

    generation_prompt: str
    headers: tuple[str, ...]
    reasoning_field: str | None
    reasoning_opening: str
    stops: frozenset[str]
    closers: frozenset[str]
    closes_last_turn: bool
    tools: bool
    system: bool
    prefix_by_turn: tuple[bool, ...]


class ChatTemplate:
    """A template with its arguments, probed.

    Args:
        source: the Jinja text, or one text a name as transformers allows ("default", "tool_use").
        special_tokens: name → token, as the template may print them (bos_token, eos_token).
        control: the tokenizer's special tokens, as text.
        arguments: fixed for the life of this object.

    Raises:
        TemplateRefused: an argument the template never reads, a date that is not fixed, a generation prompt that is
            not an addition at the end, an assistant's turn that no control token ends.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        control: Sequence[str],
        arguments: TemplateArguments,
    ) -> None:
        named = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in named:
            raise TemplateRefused(
                f"the tokenizer has chat templates named {', '.join(sorted(named))} and none named default.",
                remedy="pass chat_template=, the text of the one to use",
            )
        self.source: str = named["default"]
        self.tool_source: str = named.get("tool_use", self.source)
        self.arguments = arguments
        self.control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self._variables = dict(special_tokens) | arguments.given() | {"strftime_now": self._now}
        if arguments.date is not None and "date_string" in self.source:
            self._variables.setdefault("date_string", arguments.date.strftime("%d %b %Y"))
        for name in arguments.given():
            if not re.search(rf"\b{re.escape(name)}\b", self.source + self.tool_source):
                raise TemplateRefused(
                    f"template argument {name} = {arguments.given()[name]!r} is never read by the chat template.",
                    remedy=f"remove {name}, or use a template that knows it",
                )
        self.skeletons = Skeletons()
        self._reasoning_field: str | None = None
        self._reasoning_field = next((name for name in REASONING_FIELDS if self._takes_reasoning(name)), None)
        self.facts = self._probe()

    def _now(self, form: str) -> str:
        if self.arguments.date is None:
            raise TemplateRefused(
                "the chat template prints today's date and date is not fixed: token ids would change daily.",
                remedy="set date in the template arguments, the same in training and serving",
            )
        return self.arguments.date.strftime(form)

    def as_dict(self, message: Message, mark: Callable[[str, str], str] | None = None) -> dict[str, Any]:
        """A message as templates take it.

        Args:
            mark: changes a text by its kind ("content", "reasoning", "call", "arguments"); default none.
        """
        change = mark or (lambda _kind, text: text)
        made: dict[str, Any] = {"role": message.role}
        if message.reasoning is not None and self._reasoning_field is not None:
            made[self._reasoning_field] = change("reasoning", message.reasoning)
        made["content"] = change("content", message.content)
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": change("call", call.name), "arguments": changed_texts(call.arguments, change)},
                }
                for call in message.tool_calls
            ]
        if message.name is not None:
            made["name"] = message.name
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        return made

    def render_dicts(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None = None, *, prompt: bool = False
    ) -> str:
        """The text of messages as templates take them; `prompt` adds the generation prompt.

        Raises:
            TemplateRefused: the template's own complaint.
        """
        try:
            return compiled(self.tool_source if tools else self.source).render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (jinja2.exceptions.TemplateError, TypeError) as error:
            raise TemplateRefused(
                f"the chat template refuses these messages (roles {', '.join(str(one['role']) for one in messages)}): "
                f"{error}",
                remedy="change the messages, or use another template",
            ) from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, prompt: bool = False) -> str:
        """The text of a conversation; `prompt` adds the generation prompt. Errors as `render_dicts`."""
        return self.render_dicts([self.as_dict(message) for message in messages], tools, prompt=prompt)

    def _takes_reasoning(self, field: str) -> bool:
        answer = {"role": "assistant", "content": "b", field: _MARK}
        return _MARK in self.render_dicts([{"role": "user", "content": "a"}, answer])

    def _accepts(self, messages: Sequence[Message], needed: str) -> bool:
        """Whether the template takes the messages and shows the text; a template may refuse roles it does not know."""
        try:
            return needed in self.render(messages)
        except TemplateRefused:
            return False

    def _probe(self) -> TemplateFacts:
        question, answer = Message(role="user", content="a"), Message(role="assistant", content=_MARK)
        asked, last = self.render([question]), self.render([question, answer])
        prompt = self.render([question], prompt=True)
        if not prompt.startswith(asked) or prompt == asked:
            raise TemplateRefused(
                f"the generation prompt is not an addition at the end: {asked[-60:]!r} becomes {prompt[-60:]!r}.",
                remedy="use a template that honours add_generation_prompt",
            )
        generation = prompt[len(asked) :]
        history = self.render([question, answer, question])
        call = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"x": _MARK}),))
        result = Message(role="tool", content=_PROBE, name="f", tool_call_id="0")
        tools = self._accepts([question, call], _MARK) and self._accepts([question, call, result], _PROBE)
        ends = [_after(last)]
        if tools:
            ends.append(_after(self.render([question, call])))
        found = [match for end in ends if (match := self.control.search(end))]
        follows = [_after(history)]
        if tools:
            follows.append(_after(self.render([question, call, result])))
        history_closers = {match[0] for text in follows if (match := self.control.search(text))}
        closes_last = bool(self.control.search(ends[0]))
        stops = {match[0] for match in found} if closes_last else history_closers
        if not stops:
            raise TemplateRefused(
                f"no special token of the tokenizer ends an assistant's turn, {_after(history)[:40]!r} follows it.",
                remedy="add the template's end of turn to the tokenizer as a special token, or use its own template",
            )
        headers = _headers(generation, asked, [last, history])
        return TemplateFacts(
            generation_prompt=generation,
            headers=headers,
            reasoning_field=self._reasoning_field,
            reasoning_opening=self._opening(question, headers),
            stops=frozenset(stops),
            closers=frozenset(stops | history_closers),
            closes_last_turn=closes_last,
            tools=tools,
            system=self._accepts([Message(role="system", content=_PROBE), question], _PROBE),
            prefix_by_turn=self._prefixes(question),
        )

    def _opening(self, question: Message, headers: Sequence[str]) -> str:
        """What stands between the header and reasoning in a last turn."""
        if self._reasoning_field is None:
            return ""
        text = self.render([question, Message(role="assistant", content="b", reasoning=_MARK)])
        before = text[: text.index(_MARK)]
        return max((before[before.rindex(header) + len(header) :] for header in headers if header in before), key=len)

    def _prefixes(self, question: Message) -> tuple[bool, ...]:
        talk = [question, Message(role="assistant", content="b")] * 3
        whole = self.render(talk)
        return tuple(whole.startswith(self.render(talk[:at], prompt=True)) for at in (1, 3, 5))


def changed_texts(arguments: Any, change: Callable[[str, str], str]) -> Any:
    """A JSON value with `change` on every text in it, names of fields left alone."""
    if isinstance(arguments, str):
        return change("arguments", arguments)
    if isinstance(arguments, Mapping):
        return {key: changed_texts(value, change) for key, value in arguments.items()}
    if isinstance(arguments, list):
        return [changed_texts(value, change) for value in arguments]
    return arguments


def _after(text: str) -> str:
    """What follows the mark."""
    return text[text.index(_MARK) + len(_MARK) :]


def _headers(generation: str, asked: str, rendered: Sequence[str]) -> tuple[str, ...]:
    """The generation prompt and its beginnings that stand before an answer in a last turn or in the history."""
    found = {generation}
    for text in rendered:
        header = text[len(asked) : text.index(_MARK)]
        same = next((at for at, (a, b) in enumerate(zip(generation, header, strict=False)) if a != b), None)
        common = generation[: min(len(generation), len(header)) if same is None else same]
        if common.strip():
            found.add(common)
    return tuple(sorted(found, key=len, reverse=True))
