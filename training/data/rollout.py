"""Tokens in, tokens out: a conversation in reinforcement learning that is never rendered or encoded a second time.

What a policy sampled stays the ids it sampled: encoding its text again may give others, and its log-probabilities
belong to these. Answers of tools and users are appended as ids of what the template adds behind the stop token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.errors import TemplateRefused
from bestiary.training.data.messages import Message, Tool
from bestiary.training.data.tokenizer import BaseHFModelTokenizer, Ids
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.data.turns import lay_out


class Rollout:
    """One growing conversation.

    Args:
        messages: before the first answer.   tools: described to the policy.

    Attributes:
        messages: all so far, for rendering what comes next.
    """

    def __init__(
        self, tokenizer: BaseHFModelTokenizer, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self.messages = list(messages)
        self._ids = tokenizer.prompt_ids(messages, tools).tolist()
        self._mask = [False] * len(self._ids)

    @property
    def ids(self) -> Ids:
        """(n,) int32: what the policy sees next, every sampled id unchanged."""
        return np.array(self._ids, np.int32)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """(n,) bool: True where the policy sampled."""
        return np.array(self._mask, np.bool_)

    def say(self, sampled: Sequence[int] | Ids, message: Message) -> None:
        """Appends what the policy sampled, its stop token included.

        Args:
            message: the same as a message (content, reasoning, tool calls), which only what follows is rendered with.
        """
        self._append([int(index) for index in sampled], sampled=True)
        self.messages.append(message)

    def hear(self, messages: Sequence[Message]) -> Ids:
        """Appends answers of tools or users and the next generation prompt; returns the new ids.

        Raises:
            TemplateRefused: nothing was said, or the template changes with the generation prompt.
        """
        said = len(self.messages) - 1
        if said < 0 or self.messages[said].role != "assistant":
            raise TemplateRefused("nothing was said yet: there is nothing to answer.", remedy="call say() first")
        every = [*self.messages, *messages]
        layout = lay_out(self._tokenizer.chat, every, self._tools)
        text = self._tokenizer.chat.render(every, self._tools, prompt=True)
        if not text.startswith(layout.text):
            raise TemplateRefused("the chat template renders these messages otherwise with a generation prompt.")
        begins, ends = layout.turns[said].parts["stop"]
        start = ends if self._ids[-1] in self._tokenizer.stop_ids else begins  # cut off: the template's end closes it
        cuts = [cut - start for cut in layout.cuts if cut > start]
        (pieces,) = self._tokenizer.encode_pieces([text[start:]], [cuts])
        added = [index for piece in pieces for index in piece.ids]
        self._append(added, sampled=False)
        self.messages += messages
        return np.array(added, np.int32)

    def tokens(self) -> Tokens:
        """Ids and labels, as the packer takes them."""
        ids = self.ids
        return Tokens(ids, np.where(self.loss_mask, ids, np.int32(IGNORED)).astype(np.int32))

    def _append(self, ids: list[int], *, sampled: bool) -> None:
        self._ids += ids
        self._mask += [sampled] * len(ids)
