"""From a row to tokens and labels, for every kind of sample that has text: what a `Source` takes as its `encode`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from bestiary.kernels.errors import BestiaryError
from bestiary.training.data.chat import Conversation, encode_chats, located
from bestiary.training.data.errors import SampleRefused, TokenizerRefused
from bestiary.training.data.masks import TrainOn
from bestiary.training.data.messages import Message
from bestiary.training.data.rows import Shape, fields_of
from bestiary.training.data.samples import (
    Chat,
    Completion,
    Distillation,
    Events,
    Kind,
    Preference,
    Prompt,
    Reward,
    Sample,
    Text,
    Unpaired,
    parse,
)
from bestiary.training.data.teacher import check_rows, teacher_words
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED, Tokens

Encoded = Tokens | tuple[Tokens, Tokens]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a recipe wants of every row beside its tokens.

    Attributes:
        teacher: the teacher's words that the row has; else they stay in the file.
        temperature: that those must have been taken at; None: any.
        answer: tokens of the answer that is to be sampled to the row's prompt, at most, for which packs leave room; 0:
            none is.
    """

    teacher: bool = False
    temperature: float | None = None
    answer: int = 0

    def describe(self) -> dict[str, Any]:
        """What of it is not the default, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value != getattr(NOTHING, name)}


NOTHING = Wanted()


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Rows of one source → tokens; can be pickled, so it travels to producer processes.

    Attributes:
        tokenizer: decides the ids.   kind: of the records.   shape, columns: how rows are written.
        rows: makes the row that is read from the one in the file; a function with a name that can be imported.
        train_on: of conversations; preference pairs, unpaired and reward samples train what follows the prompt.
        as_chat: a prompt and its completion as a question and an answer in the chat template.
        reasoning: `keep` it, or `drop` it before rendering.
        neutralise: control tokens that people's texts spell out stay text.
        wanted: beside tokens and labels.

    Labels mark what is trained. A reward sample marks its last token, where the score is read; a prompt for
    reinforcement learning marks nothing. Tokens carry the sample's number, see `value_of`; those of a pair both.
    """

    tokenizer: BaseHFModelTokenizer
    kind: Kind
    shape: Shape = "plain"
    rows: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = field(default_factory=TrainOn)
    as_chat: bool = False
    reasoning: Literal["keep", "drop"] = "keep"
    neutralise: bool = True
    wanted: Wanted = NOTHING

    def describe(self) -> str:
        """What tokens and labels depend on beside the tokenizer, as JSON: a state taken under another is refused."""
        settings: dict[str, Any] = {
            "kind": self.kind,
            "shape": self.shape,
            "columns": dict(self.columns),
            "train_on": self.train_on.model_dump(mode="json"),
            "as_chat": self.as_chat,
            "reasoning": self.reasoning,
            "neutralise": self.neutralise,
        }
        if self.rows is not None:
            settings["rows"] = f"{self.rows.__module__}:{self.rows.__qualname__}"
        return json.dumps(settings | self.wanted.describe(), sort_keys=True)

    def __call__(self, row: Mapping[str, Any]) -> Encoded:
        """One row; a pair for preferences. Errors as `encode`."""
        return self.encode([self.sample(row, "the row")], ["the row"])[0]

    def sample(self, row: Mapping[str, Any], where: str) -> Sample:
        """The record of a row.

        Raises:
            SampleRefused: names the row and the field.
        """
        if self.rows is not None:
            try:
                row = self.rows(row)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise SampleRefused(f"{where}: the source's function over rows raised {told}.") from error
        try:
            fields = fields_of(row, self.kind, shape=self.shape, columns=self.columns, where=where)
        except json.JSONDecodeError as error:
            raise SampleRefused(f"{where}: JSON text inside the row cannot be read: {error}.") from error
        return parse(self.kind, fields, where)

    def encode(self, samples: Sequence[Sample], where: Sequence[str]) -> list[Encoded]:
        """Records → tokens, all of them in one call of the engine, with what else is wanted.

        Args:
            where: names each sample in errors.

        Raises:
            SampleRefused: events, which have no text. TemplateRefused, MaskRefused, TokenizerRefused: name the sample.
        """
        found = self._encoded(samples, where)
        if not self.wanted.answer:
            return found
        return [replace(one, least=one.prompt + self.wanted.answer) for one in found if isinstance(one, Tokens)]

    def _encoded(self, samples: Sequence[Sample], where: Sequence[str]) -> list[Encoded]:
        if self.kind in {"completion", "text"} and not self.as_chat:
            return [*self._plain(samples, where)]
        talks: list[Conversation] = []
        for sample, place in zip(samples, where, strict=True):
            talks += self.conversations(sample, place)
        if self.kind == "prompt":
            return [self._prompt(talk) for talk in talks]
        chats = encode_chats(self.tokenizer, talks, train_on=self._train_on, neutralise=self.neutralise)
        tokens = [chat.tokens() for chat in chats]
        if self.kind == "preference":
            margins = [value_of(sample) for sample in samples]
            pairs = zip(tokens[::2], tokens[1::2], margins, strict=True)
            return [(replace(one, value=margin), replace(other, value=margin)) for one, other, margin in pairs]
        if self.kind in {"unpaired", "reward"}:
            tokens = [replace(one, value=value_of(sample)) for one, sample in zip(tokens, samples, strict=True)]
        if self.kind == "reward":
            return [_last(one) for one in tokens]
        if self.wanted.teacher:
            tokens = [self._taught(*one) for one in zip(samples, tokens, where, strict=True)]
        else:
            for sample, one, place in zip(samples, tokens, where, strict=True):
                if isinstance(sample, Distillation) and sample.teacher_ids is not None:
                    check_rows(sample.teacher_ids, sample.teacher_digest, one, place)
        return [*tokens]

    def _taught(self, sample: Sample, tokens: Tokens, where: str) -> Tokens:
        """The tokens with their teacher's words."""
        if not isinstance(sample, Distillation):
            raise SampleRefused(
                f"{where}: a sample of kind {self.kind} has no teacher_ids.", remedy="kind: distillation"
            )
        known = self.tokenizer.vocab_rows or len(self.tokenizer)
        temperature = self.wanted.temperature
        return replace(
            tokens, teacher=teacher_words(sample, tokens, vocabulary=known, temperature=temperature, where=where)
        )

    @property
    def _train_on(self) -> TrainOn:
        """Pairs and scored samples mark their messages themselves."""
        return TrainOn() if self.kind in {"preference", "unpaired", "reward"} else self.train_on

    def conversations(self, sample: Sample, where: str) -> list[Conversation]:
        """The conversations of a record: two for a pair, the chosen one first.

        Raises:
            SampleRefused: it has none.
        """
        if isinstance(sample, Completion):
            sample = sample.as_chat()
        if isinstance(sample, Preference):
            prompt = [_untrained(message) for message in sample.prompt]
            return [
                Conversation(self._kept([*prompt, *answer]), sample.tools, f"{where}, {name}")
                for name, answer in (("chosen", sample.chosen), ("rejected", sample.rejected))
            ]
        if isinstance(sample, Unpaired | Reward):
            messages = [*map(_untrained, sample.messages[:-1]), sample.messages[-1]]
            return [Conversation(self._kept(messages), sample.tools, where)]
        if isinstance(sample, Chat | Distillation):
            return [Conversation(self._kept(sample.messages), sample.tools, where)]
        if isinstance(sample, Prompt):
            return [Conversation(self._kept(sample.prompt), sample.tools, where)]
        raise SampleRefused(
            f"{where}: a sample of kind {self.kind} is no conversation.", remedy="events are encoded by EventEncoder"
        )

    def _kept(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.reasoning == "keep" or all(message.reasoning is None for message in messages):
            return messages
        return [message.model_copy(update={"reasoning": None}) for message in messages]

    def _prompt(self, talk: Conversation) -> Tokens:
        try:
            ids = self.tokenizer.prompt_ids(talk.messages, talk.tools, neutralise=self.neutralise)
        except BestiaryError as error:
            raise located(error, talk.where) from error
        return Tokens(ids, np.full(len(ids), IGNORED, np.int32))

    def _plain(self, samples: Sequence[Sample], where: Sequence[str]) -> list[Tokens]:
        """Texts; of a completion the prompt is encoded alone, as serving does."""
        end = self.tokenizer.eos_id
        if end is None:
            raise TokenizerRefused(
                "the tokenizer has no eos_token to end a text with.", read_from=self.tokenizer.source
            )
        texts: list[str] = []
        for sample, place in zip(samples, where, strict=True):
            if isinstance(sample, Completion):
                texts += [sample.prompt, sample.completion]
            elif isinstance(sample, Text):
                texts += ["", sample.text]
            else:
                raise SampleRefused(f"{place}: expected a sample of kind {self.kind}.")
        going_on = [bool(place % 2 and texts[place - 1]) for place in range(len(texts))]
        pieces = self.tokenizer.encode_texts(texts, bos=False, neutralise=self.neutralise, going_on=going_on)
        front = [self.tokenizer.bos_id] if self.tokenizer.adds_bos else []
        made = []
        for prompt, answer in zip(pieces[::2], pieces[1::2], strict=True):
            ids = np.array([*front, *prompt, *answer, end], np.int32)
            labels = ids.copy()
            labels[: len(front) + len(prompt)] = IGNORED
            made.append(Tokens(ids, labels))
        return made


def value_of(sample: Sample) -> float | None:
    """The number that a sample carries beside its tokens: a score, 1 and 0 for wanted and unwanted, a pair's margin."""
    if isinstance(sample, Reward):
        return sample.score
    if isinstance(sample, Preference):
        return sample.margin
    return float(sample.label) if isinstance(sample, Unpaired) else None


@dataclass(frozen=True, kw_only=True)
class EventEncoder:
    """Events → tokens without a tokenizer: an item is the token `first_id + item`, all but the first are trained.

    Attributes:
        items: how many there are.   first_id: of item 0.   columns: field → column of the file.
    """

    items: int
    first_id: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, row: Mapping[str, Any]) -> Tokens:
        """One row.

        Raises:
            SampleRefused: a record that is wrong, semantic ids, or an item beyond `items`.
        """
        sample = parse("events", fields_of(row, "events", columns=self.columns), "the row")
        if not isinstance(sample, Events) or sample.items is None:
            raise SampleRefused("the row: codes need a tokenizer with semantic ids.", remedy="SemanticIds.encode")
        found = np.array(sample.items, np.int64)
        if int(found.max()) >= self.items:
            raise SampleRefused(f"the row: item {int(found.max())} of {self.items}.", remedy="number items from 0")
        ids = (found + self.first_id).astype(np.int32)
        labels = ids.copy()
        labels[0] = IGNORED
        return Tokens(ids, labels)


def _untrained(message: Message) -> Message:
    return message.model_copy(update={"train": False}) if message.role == "assistant" else message


def _last(tokens: Tokens) -> Tokens:
    """Only the last trained token marked."""
    labels = np.full(len(tokens.input_ids), IGNORED, np.int32)
    at = int(np.flatnonzero(tokens.labels != IGNORED)[-1])
    labels[at] = tokens.input_ids[at]
    return replace(tokens, labels=labels)
