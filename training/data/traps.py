"""Known traps of tokenizers, templates and data, found in what is about to be trained; each in one sentence."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bestiary.training.data.chat import EncodedChat
from bestiary.training.data.messages import Message
from bestiary.training.data.samples import (
    Chat,
    Completion,
    Distillation,
    Preference,
    Prompt,
    Reward,
    Sample,
    Text,
    Unpaired,
)
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED, Tokens

if TYPE_CHECKING:
    from bestiary.training.data.config import SourceConfig

_TAG = re.compile(r"<[^<>]*>")
LITTLE, MUCH = 0.01, 0.95  # share of trained tokens in a conversation that is worth a look


def template_warnings(tokenizer: BaseHFModelTokenizer) -> list[str]:
    """What a tokenizer and its template do that surprises people."""
    found = []
    hf = tokenizer.hf
    if hf.pad_token_id is not None and hf.pad_token_id in tokenizer.stop_ids:
        found.append(
            f"The tokenizer's own pad token {hf.pad_token!r} is a stop token; "
            f"{hf.convert_ids_to_tokens(tokenizer.pad_id)!r} pads instead. Mask by length, never by id."
        )
    if tokenizer.template is None:
        return found
    facts = tokenizer.template.facts
    if not all(facts.prefix_by_turn):
        turns = [str(turn) for turn, same in enumerate(facts.prefix_by_turn) if not same]
        found.append(
            f"Serving renders the prompt of turns {', '.join(turns)} (of three) otherwise than the whole conversation: "
            "train the last turn, or one sample a turn."
        )
    if untrained := sorted(facts.closers - facts.stops):
        found.append(
            f"Earlier turns are closed by {', '.join(untrained)}, which ends no generation: it is not trained there."
        )
    if tokenizer.adds_bos and not tokenizer.chat.render([Message(role="user", content="a")]).startswith(hf.bos_token):
        found.append(
            f"The template begins without {hf.bos_token!r}, which is put in front here, as in front of every text: "
            "servers that add nothing to a rendered conversation must be told to."
        )
    if not facts.closes_last_turn:
        found.append("The template does not end the last turn: the end of text is added and trained.")
    if "strftime_now" in tokenizer.template.source or tokenizer.arguments.date is not None:
        found.append(f"The template prints a date, here always {tokenizer.arguments.date}: serving must fix the same.")
    if "<|channel|>" in facts.reasoning_opening:
        found.append("Some servers render harmony with code of their own and ignore the template: compare their ids.")
    rows = tokenizer.vocab_rows
    if rows is not None and len(tokenizer) > rows:
        found.append(
            f"The tokenizer has {len(tokenizer)} tokens, the model {rows} rows: ids from there on are refused."
        )
    return found


class Findings:
    """Counts traps over the samples of a source."""

    def __init__(self, tokenizer: BaseHFModelTokenizer, source: SourceConfig, pack_length: int, overflow: str) -> None:
        self._tokenizer, self._source = tokenizer, source
        self._pack_length, self._overflow = pack_length, overflow
        self._counts: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._samples = 0

    def look(self, sample: Sample, tokens: Sequence[Tokens], chats: Sequence[EncodedChat | None]) -> None:
        """Counts what is wrong with one sample."""
        self._samples += 1
        texts = list(_texts(sample))
        note = self._counts
        note["control"] += any(self._tokenizer.control.search(text) for text in texts)
        decoded = [self._tokenizer.decode(one.input_ids) for one in tokens]
        kept = [text for text in texts if text.strip()]
        note["trimmed"] += any(_only_trimmed(text, decoded) for text in kept)
        note["changed"] += any(all(text.strip() not in whole for whole in decoded) for text in kept)
        note["long"] += sum(len(one) for one in tokens) > self._pack_length
        digest = hashlib.blake2b(b"".join(one.input_ids.tobytes() for one in tokens), digest_size=16).digest()
        note["twice"] += digest in self._seen
        self._seen.add(digest)
        for one, chat in zip(tokens, chats, strict=True):
            share = float((one.labels != IGNORED).mean())
            note["little"] += share < LITTLE and not isinstance(sample, Prompt | Reward)
            note["much"] += share > MUCH and not isinstance(sample, Text)
            if chat is not None:
                parts = [turn.parts["reasoning"] for turn in chat.turns if "reasoning" in turn.parts]
                thoughts = [one.input_ids[start:end] for start, end in parts]
                note["thoughtless"] += any(not _TAG.sub("", self._tokenizer.decode(ids)).strip() for ids in thoughts)
                note["empty"] += any(turn.role == "assistant" and not set(turn.parts) - {"stop"} for turn in chat.turns)

    def words(self) -> list[str]:
        """The traps that were found, with their counts."""
        kept = "kept as text" if self._source.neutralise else "which become the tokens themselves"
        words = {
            "control": f"spell out control tokens in their texts, {kept}",
            "trimmed": "begin or end with white space that the template trims",
            "changed": "hold text that does not come back from its ids: dropped by the template, or normalised",
            "long": f"are longer than a pack of {self._pack_length} (overflow: {self._overflow})",
            "thoughtless": "train an empty block of reasoning: give reasoning, or set enable_thinking to false",
            "twice": "are the same as one before",
            "little": f"train less than {LITTLE:.0%} of their tokens",
            "much": f"train more than {MUCH:.0%} of their tokens",
            "empty": "have an assistant's turn without a word",
        }
        return [
            f"{self._counts[name]} of {self._samples} {text}." for name, text in words.items() if self._counts[name]
        ]


def _only_trimmed(text: str, decoded: Sequence[str]) -> bool:
    return (
        text != text.strip()
        and all(text not in whole for whole in decoded)
        and any(text.strip() in whole for whole in decoded)
    )


def _texts(sample: Sample) -> list[str]:
    """What people wrote."""
    if isinstance(sample, Completion):
        return [sample.prompt, sample.completion]
    if isinstance(sample, Text):
        return [sample.text]
    if isinstance(sample, Preference):
        messages = [*sample.prompt, *sample.chosen, *sample.rejected]
    elif isinstance(sample, Prompt):
        messages = [*sample.prompt]
    elif isinstance(sample, Chat | Unpaired | Reward | Distillation):
        messages = [*sample.messages]
    else:
        return []
    return [text for one in messages for text in (one.content, one.reasoning or "")]
