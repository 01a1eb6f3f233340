"""What one row of data is: a checked record for each kind of training, with the row's place in every error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.messages import Message, Tool

Kind = Literal["chat", "completion", "text", "preference", "unpaired", "reward", "prompt", "distillation", "events"]
Messages = Annotated[tuple[Message, ...], Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _ends_with_an_answer(messages: tuple[Message, ...], field: str) -> None:
    if messages[-1].role != "assistant":
        raise ValueError(f"{field} ends with a message of role {messages[-1].role!r}, expected 'assistant'")


class Chat(_Record):
    """A conversation to imitate."""

    messages: Messages
    tools: tuple[Tool, ...] | None = None

    @model_validator(mode="after")
    def _answered(self) -> Self:
        if not any(message.role == "assistant" for message in self.messages):
            raise ValueError("messages holds no message of role 'assistant'")
        return self


class Completion(_Record):
    """A prompt and what follows it, as plain text; only the completion is trained, with the end of text."""

    prompt: str
    completion: Annotated[str, Field(min_length=1)]

    def as_chat(self) -> Chat:
        """The same as a question and an answer."""
        asked = Message(role="user", content=self.prompt)
        return Chat(messages=(asked, Message(role="assistant", content=self.completion)))


class Text(_Record):
    """Plain text, all of it trained, with the end of text."""

    text: Annotated[str, Field(min_length=1)]


class Preference(_Record):
    """Two continuations of one conversation, the better one first, and by how much, if that is known."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: Finite | None = None
    tools: tuple[Tool, ...] | None = None

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        _ends_with_an_answer(self.chosen, "chosen")
        _ends_with_an_answer(self.rejected, "rejected")
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected are equal: there is nothing to prefer")
        return self


class Unpaired(_Record):
    """One continuation and whether it is wanted."""

    messages: Messages
    label: bool
    tools: tuple[Tool, ...] | None = None

    @model_validator(mode="after")
    def _answered(self) -> Self:
        _ends_with_an_answer(self.messages, "messages")
        return self


class Reward(_Record):
    """A conversation and its score."""

    messages: Messages
    score: Finite
    tools: tuple[Tool, ...] | None = None

    @model_validator(mode="after")
    def _answered(self) -> Self:
        _ends_with_an_answer(self.messages, "messages")
        return self


class Prompt(_Record):
    """What a policy is asked in reinforcement learning, and what its answer is judged by."""

    prompt: Messages
    answer: str | None = None
    tools: tuple[Tool, ...] | None = None
    extra: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if self.prompt[-1].role == "assistant":
            raise ValueError("prompt ends with a message of role 'assistant': there is nothing to answer")
        return self


class Distillation(_Record):
    """A conversation that a teacher wrote, and for each trained token the teacher's likeliest tokens, if kept.

    Attributes:
        teacher_ids, teacher_log_probs: a row a trained token, its likeliest words first or in any order; both or none.
        teacher_digest: of the tokens that they belong to (`tokens.digest_of`); None: only their number is compared.
        teacher_temperature: that the log-probabilities were taken at.
    """

    messages: Messages
    tools: tuple[Tool, ...] | None = None
    teacher: str | None = None
    teacher_ids: tuple[tuple[int, ...], ...] | None = None
    teacher_log_probs: tuple[tuple[float, ...], ...] | None = None
    teacher_digest: str | None = None
    teacher_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        _ends_with_an_answer(self.messages, "messages")
        ids = None if self.teacher_ids is None else [len(row) for row in self.teacher_ids]
        log_probs = None if self.teacher_log_probs is None else [len(row) for row in self.teacher_log_probs]
        if ids != log_probs:
            raise ValueError("teacher_ids and teacher_log_probs have different shapes")
        if any(value > 0 for row in self.teacher_log_probs or () for value in row):
            raise ValueError("teacher_log_probs holds a log-probability above 0")
        return self


class Events(_Record):
    """What one user did, in order: items by their ids, or by semantic ids (one code a level), with features.

    Attributes:
        items: raw ids, from 0.   codes: semantic ids; one of both.
        features: numbers for each event, by name.   times: not falling, in seconds.
    """

    items: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    codes: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = None
    features: dict[str, tuple[Finite, ...]] = Field(default_factory=dict)
    times: tuple[Finite, ...] | None = None
    user: str | int | None = None

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if (self.items is None) == (self.codes is None):
            raise ValueError("give items or codes, one of both")
        events = len(self)
        if events == 0:
            raise ValueError("the sequence is empty")
        if self.codes is not None and len({len(code) for code in self.codes}) > 1:
            raise ValueError("codes have different numbers of levels")
        for name, values in self.features.items():
            if len(values) != events:
                raise ValueError(f"features[{name!r}] has {len(values)} values for {events} events")
        if self.times is not None:
            if len(self.times) != events:
                raise ValueError(f"times has {len(self.times)} values for {events} events")
            if any(later < earlier for earlier, later in zip(self.times, self.times[1:], strict=False)):
                raise ValueError("times fall: sort the events")
        return self

    def __len__(self) -> int:
        return len(self.items if self.items is not None else self.codes or ())


Sample = Chat | Completion | Text | Preference | Unpaired | Reward | Prompt | Distillation | Events
RECORDS: dict[str, type[_Record]] = {
    "chat": Chat,
    "completion": Completion,
    "text": Text,
    "preference": Preference,
    "unpaired": Unpaired,
    "reward": Reward,
    "prompt": Prompt,
    "distillation": Distillation,
    "events": Events,
}


def parse(kind: Kind, row: Mapping[str, Any], where: str) -> Sample:
    """A row as the record of its kind.

    Args:
        where: source and row, for the error.

    Raises:
        SampleRefused: names the row, the field, what is wrong with it, and the fields the row has.
    """
    record = RECORDS[kind]
    try:
        made: Sample = record.model_validate(row)  # type: ignore[assignment]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole row"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise SampleRefused(
            f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}{more}.",
            read_from=f"a row with {', '.join(sorted(row)) or 'nothing'}, as {kind}",
            remedy=f"{kind} has the fields {', '.join(record.model_fields)}; columns maps the file's names to them",
        ) from error
    return made
