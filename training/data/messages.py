"""One message of a conversation, checked; the same record for every template."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

Role = Literal["system", "developer", "user", "assistant", "tool"]
Span = tuple[int, int]


def _text_of(content: Any) -> Any:
    """The text of content given as a list of text parts; anything else as it is, for pydantic to judge."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", part.get("value", ""))) for part in content)
    return content


class ToolCall(BaseModel):
    """A call of a function by the assistant.

    Attributes:
        name: of the function.
        arguments: by name; JSON text of an object becomes that object, other text stays as it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, JsonValue] | str = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Takes OpenAI's nesting {"type": "function", "function": {…}} too, and arguments as JSON text."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = {key: value["function"][key] for key in ("name", "arguments") if key in value["function"]}
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            try:
                parsed = json.loads(value["arguments"])
            except json.JSONDecodeError:
                return value
            return {**value, "arguments": parsed} if isinstance(parsed, dict) else value
        return value


class Message(BaseModel):
    """One message.

    Attributes:
        content: its text; a list of text parts is joined.
        reasoning: what an assistant thought before it answered; rendered where and how the template does.
        tool_calls: of an assistant.   name: of the tool that answers.   tool_call_id: which call it answers.
        train: whether an assistant's message is trained, overruling the choice of turns; None leaves it to that.
        train_spans: character ranges [start, end) of `content`; if given, only these are trained of this message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    content: Annotated[str, BeforeValidator(_text_of)] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    train: bool | None = None
    train_spans: tuple[Span, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Message:
        if self.role != "assistant":
            for field in ("reasoning", "tool_calls", "train_spans"):
                if getattr(self, field):
                    raise ValueError(f"{field} belongs to an assistant's message, the role is {self.role!r}")
            if self.train:
                raise ValueError(f"train = True: only an assistant's message can be trained, the role is {self.role!r}")
        for start, end in self.train_spans or ():
            if not 0 <= start < end <= len(self.content):
                raise ValueError(
                    f"train_spans ({start}, {end}) lies outside the content of {len(self.content)} characters"
                )
        return self


Tool = dict[str, Any]
Conversation = tuple[Message, ...]
