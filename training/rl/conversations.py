"""Environments that speak: a partner who answers the policy's messages, and the ids that serving would append.

The ids that the policy sampled stay as they are; the text they spell is only read. What follows an answer is what the
chat template puts there (`bestiary.training.data.rollout.Rollout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.messages import Message, Tool
from bestiary.training.data.rollout import Rollout
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tool_calls import CallForm
from bestiary.training.data.tool_calls import Said as Read
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.tools import Tools

_MESSAGES = TypeAdapter(tuple[Message, ...])


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a partner says to a message of the policy.

    Attributes:
        messages: of tools or users; none: the conversation is over.
        rewards, extra: as of `Heard`.
    """

    messages: Sequence[Message] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class Partner(Protocol):
    """Who the policy talks to, in one conversation. May raise, as an `Environment` may.

    Attributes:
        tools: described to the policy.
    """

    tools: Sequence[Tool]

    def begin(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """What stands before the first answer; `asked(prompt)` is what the row says."""
        ...

    def reply(self, read: Read, said: Said) -> Reply:
        """Hear an answer, as a message and as it was sampled."""
        ...

    def cut_off(self) -> Mapping[str, float | None]:
        """See `Environment.cut_off`."""
        ...

    def close(self) -> None:
        """See `Environment.close`."""
        ...


class Conversation:
    """An `Environment` in a language.

    An answer that was cut off is the last one: what it would have said is not known.

    Args:
        tokenizer: with a chat template.
        partner: of this conversation.
        read: an answer's text, without its stop token, to a message; None: as the chat template writes messages.

    Attributes:
        tools: described to the policy.
    """

    def __init__(
        self,
        tokenizer: BaseHFModelTokenizer,
        partner: Partner,
        *,
        read: Callable[[str, Sequence[Tool]], Read] | None = None,
    ) -> None:
        self._tokenizer, self._partner, self.tools = tokenizer, partner, partner.tools
        self._read = CallForm.of(tokenizer.chat).read if read is None else read
        self._rollout: Rollout | None = None

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """See `Environment`."""
        messages = self._partner.begin(prompt, seed=seed)
        self._rollout = Rollout(self._tokenizer, messages, list(self.tools) or None)
        ids: list[int] = self._rollout.ids.tolist()
        return ids

    def step(self, said: Said) -> Heard:
        """See `Environment`."""
        rollout = self._rollout
        assert rollout is not None
        ends = bool(said.ids) and said.ids[-1] in self._tokenizer.stop_ids
        read = self._read(self._tokenizer.decode(said.ids[:-1] if ends else said.ids), self.tools)
        reply = self._partner.reply(read, said)
        if said.finish == "length" or not reply.messages:
            return Heard(done=True, rewards=reply.rewards, extra=reply.extra)
        # Reasoning and text beside calls were said in ids; templates show them in history each in their own way.
        calls = read.message.tool_calls
        spoken = Message(role="assistant", content="" if calls else read.message.content, tool_calls=calls)
        rollout.say(said.ids, spoken)
        return Heard(ids=rollout.hear(reply.messages).tolist(), rewards=reply.rewards, extra=reply.extra)

    def cut_off(self) -> Mapping[str, float | None]:
        """See `Environment`."""
        return self._partner.cut_off()

    def close(self) -> None:
        """See `Environment`."""
        self._partner.close()


class ToolUse:
    """A `Partner` that runs the tools which the policy calls, until it calls none.

    It pays nothing; reward functions read `extra`: tool_calls, their number; tool_errors, of those that failed; and
    broken_calls, answers with an opening that no call follows, which end the conversation as any without a call.

    Args:
        tools: shared by all conversations, and not closed with one.
        calls: in a conversation, at most; further ones are answered by an error.
    """

    def __init__(self, tools: Tools, *, calls: int = 64) -> None:
        self.tools: Sequence[Tool] = tools.described
        self._tools, self._most = tools, calls
        self._called = self._failed = self._broken = 0

    def begin(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """See `Partner`."""
        return asked(prompt)

    def reply(self, read: Read, said: Said) -> Reply:
        """See `Partner`."""
        messages = []
        self._broken += read.broken
        if said.finish == "stop":
            for call in read.message.tool_calls:
                self._called += 1
                over = self._called > self._most
                result = None if over else self._tools.call(call)
                self._failed += result is None or result.failed is not None
                text = f"Error: no more than {self._most} calls." if result is None else result.text
                messages.append(Message(role="tool", content=text, name=call.name))
        extra = {"tool_calls": self._called, "tool_errors": self._failed, "broken_calls": self._broken}
        return Reply(messages=messages, extra=extra)

    def cut_off(self) -> Mapping[str, float | None]:
        """See `Partner`."""
        return {}

    def close(self) -> None:
        """See `Partner`."""


class ToolEnvironments:
    """An `EnvironmentFactory` of conversations with tools.

    Args:
        tokenizer: the policy's, with a chat template that knows tools.
        tools: closed by whoever made them.   calls: see `ToolUse`.
    """

    def __init__(self, tokenizer: BaseHFModelTokenizer, tools: Tools, *, calls: int = 64) -> None:
        self._tokenizer, self._tools, self._calls = tokenizer, tools, calls
        self._form = CallForm.of(tokenizer.chat)

    def __call__(self) -> Conversation:
        """One more."""
        return Conversation(self._tokenizer, ToolUse(self._tools, calls=self._calls), read=self._form.read)


def asked(prompt: Prompt) -> tuple[Message, ...]:
    """The conversation that a row asks to go on with: its `prompt`, a text or messages, else its `messages` without the
    answer at their end.

    Raises:
        SampleRefused: it has none.
    """
    given = prompt.row.get("prompt", prompt.row.get("messages"))
    if isinstance(given, str):
        return (Message(role="user", content=given),)
    try:
        found = _MESSAGES.validate_python(given)
    except ValidationError as error:
        raise SampleRefused(
            f"prompt {prompt.prompt_id}: {error.errors()[0]['msg']}.",
            read_from=f"a row with {', '.join(sorted(prompt.row)) or 'nothing'}",
            remedy="a column `prompt` with a text or messages, or `messages`",
        ) from error
    while found and found[-1].role == "assistant":
        found = found[:-1]
    return found
