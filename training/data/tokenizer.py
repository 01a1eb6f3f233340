"""The tokenizer layer: Hugging Face's AutoTokenizer decides every id; this layer decides what is asked of it.

It adds what training and serving must agree on: a pad token that is no stop token, the stop tokens, one beginning-of-
sequence token, template arguments that do not change from day to day, control tokens in people's texts that stay text,
and a fingerprint of all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bestiary.bridges.hub import resolve_tokenizer
from bestiary.training.data.errors import SampleRefused, TemplateRefused, TokenizerRefused
from bestiary.training.data.fingerprint import PROBES, Fingerprint, digest, digest_ids, versions
from bestiary.training.data.messages import Message, Tool
from bestiary.training.data.template import ChatTemplate, TemplateArguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]


class BaseHFModelTokenizer:
    """AutoTokenizer with the promises that training relies on.

    Args:
        hf: what AutoTokenizer made; it must have a fast engine.
        arguments: of the chat template, fixed.
        chat_template: replaces the tokenizer's own.
        pad_token: chosen instead of the one that is found; a known token that is no stop token.
        stop_tokens: further tokens that end generation, for tokenizers without a template.
        vocab_rows: rows of the model's embedding; ids beyond are refused when they occur.
        source: the folder it came from, whose tokenizer.json is hashed.

    Attributes:
        hf: the transformers tokenizer.   template: the probed chat template, or None.
        pad_id, bos_id, eos_id: ids; pad is never a stop token. Mask by length, not by `pad_id`.
        stop_ids: everything that ends generation.
        adds_bos: whether the tokenizer's convention puts a beginning-of-sequence token in front of text.

    Raises:
        TokenizerRefused: no fast engine, no pad token that is distinct, an unknown token.
        TemplateRefused: the chat template, see `ChatTemplate`.
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        *,
        arguments: TemplateArguments | None = None,
        chat_template: str | None = None,
        pad_token: str | None = None,
        stop_tokens: Sequence[str] = (),
        vocab_rows: int | None = None,
        source: str | None = None,
    ) -> None:
        if not hf.is_fast:
            raise TokenizerRefused(
                f"{type(hf).__name__} has no fast engine: no character offsets, no threads.",
                read_from=source,
                remedy="use a checkpoint with tokenizer.json",
            )
        self.hf = hf
        self.source = source
        self.vocab_rows = vocab_rows
        self._engine: Any = hf.backend_tokenizer
        added = hf.added_tokens_decoder
        self._special = {token.content: index for index, token in sorted(added.items()) if token.special}
        self.control = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or "(?!)")
        text = chat_template if chat_template is not None else hf.chat_template
        self._rendered = text
        self.template: ChatTemplate | None = None
        self.arguments = arguments or TemplateArguments()
        if text:
            named = {name: token for name, token in hf.special_tokens_map.items() if isinstance(token, str)}
            self.template = ChatTemplate(
                text, special_tokens=named, control=list(self._special), arguments=self.arguments
            )
        elif self.arguments.given():
            raise TemplateRefused(
                f"template arguments {', '.join(self.arguments.given())} are given and there is no chat template.",
                read_from=source,
                remedy="pass chat_template=, or remove the arguments",
            )
        self.bos_id: int | None = hf.bos_token_id
        self.eos_id: int | None = hf.eos_token_id
        probed = sorted(self.template.facts.stops) if self.template else []
        named_stops = {self.id_of(token) for token in (*probed, *stop_tokens)}
        self.stop_ids = frozenset(named_stops | ({self.eos_id} if self.eos_id is not None else set()))
        self.pad_id = self._choose_pad(pad_token)
        self.adds_bos = self.bos_id is not None and self._engine.encode("a").ids[:1] == [self.bos_id]

    @classmethod
    def from_pretrained(
        cls, src: str | Path, *, revision: str | None = None, fingerprint: Fingerprint | None = None, **options: Any
    ) -> BaseHFModelTokenizer:
        """AutoTokenizer's, from a folder or a hub id.

        Args:
            fingerprint: a stored one that it must match.
            options: as the constructor's.

        Raises:
            FingerprintChanged: says what changed.   TokenizerRefused: it is code. Errors as the constructor's.
            CheckpointNotFound, OfflineError: there is no such folder or hub id, or no hub.
        """
        from transformers import AutoTokenizer  # seconds, which a process that only computes does not need

        folder = resolve_tokenizer(src, revision=revision)  # of which transformers then asks no hub
        try:
            found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except ValueError as error:
            if "custom code" not in str(error):
                raise
            raise TokenizerRefused(
                f"{src}: this tokenizer is code that comes with the checkpoint, which is not run.",
                read_from=str(src),
                remedy="a tokenizer that transformers knows: save it once as tokenizer.json where you trust that code",
            ) from error
        found.name_or_path = str(src)
        made = cls(found, source=str(src), **options)
        if fingerprint is not None:
            made.fingerprint.require(fingerprint, str(src))
        return made

    def __len__(self) -> int:
        return len(self.hf)

    def id_of(self, token: str) -> int:
        """The id of a token.

        Raises:
            TokenizerRefused: there is none.
        """
        index = self._engine.token_to_id(token)
        if index is None:
            raise TokenizerRefused(f"{token!r} is no token of this tokenizer.", read_from=self.source)
        return int(index)

    def _choose_pad(self, wanted: str | None) -> int:
        if wanted is not None:
            index = self.id_of(wanted)
            if index in self.stop_ids:
                raise TokenizerRefused(
                    f"pad_token = {wanted!r} is a stop token: a model trained with it may never learn to stop.",
                    remedy="choose a token that ends nothing",
                )
            return index
        used = self.template.source if self.template else ""
        declared = [self.hf.pad_token] if isinstance(self.hf.pad_token, str) else []
        reserved = [
            token for token in self._special if re.search(r"pad|reserved|unused|finetune", token, re.IGNORECASE)
        ]
        reserved.sort(key=lambda token: "pad" not in token.lower())
        unknown = [self.hf.unk_token] if isinstance(self.hf.unk_token, str) else []
        for token in (*declared, *(one for one in reserved if one not in used), *unknown):
            index = self.id_of(token)
            if index not in self.stop_ids and index != self.bos_id:
                return index
        raise TokenizerRefused(
            "the tokenizer has no pad token that is neither a stop token nor the beginning of a sequence "
            f"(pad_token = {self.hf.pad_token!r}, eos_token = {self.hf.eos_token!r}).",
            read_from=self.source,
            remedy="pass pad_token= with a token that text never needs",
        )

    # Text → ids

    def cuts_of(self, text: str) -> list[int]:
        """Places inside control tokens that a text spells out; cut there, they stay text."""
        return [match.start() + 1 for match in self.control.finditer(text)]

    def encode_pieces(
        self, texts: Sequence[str], cuts: Sequence[Sequence[int]], going_on: Sequence[bool] | None = None
    ) -> list[list[Any]]:
        """The engine's encodings of texts cut into pieces, all in one batch; no token is added.

        SentencePiece puts a space in front of every text that it is given. A piece behind a cut, or behind another
        text, gets none: decoded in a row they are the texts, no more and no less.

        Args:
            cuts: for each text, ascending places where it is cut.
            going_on: for each text, whether it stands behind another one; default none does.
        Raises:
            SampleRefused: a text with half of a surrogate pair, which JSON can spell and no encoding has.
        """
        if self._engine.truncation is not None:
            self._engine.no_truncation()
        if self._engine.padding is not None:
            self._engine.no_padding()
        self._engine.encode_special_tokens = False
        flat: list[str] = []
        counts: list[int] = []
        behind: list[int] = []  # pieces that go on
        for number, (text, places) in enumerate(zip(texts, cuts, strict=True)):
            edges = [0, *places, len(text)]
            if self._anchor is not None:
                goes_on = going_on is not None and going_on[number]
                behind += range(len(flat) + (not goes_on), len(flat) + len(edges) - 1)
            flat += [text[a:b] for a, b in pairwise(edges)]
            counts.append(len(edges) - 1)
        for place in behind:
            flat[place] = f"{self._anchor}{flat[place]}"
        try:
            encoded = self._engine.encode_batch(flat, add_special_tokens=False)
        except TypeError as error:
            refused = _halved(flat)
            if refused is None:
                raise
            raise refused from error
        for place in behind:
            encoded[place] = _behind(encoded[place], self._anchor or "", self._anchor_ids)
        made, at = [], 0
        for count in counts:
            made.append(encoded[at : at + count])
            at += count
        return made

    @cached_property
    def _anchor(self) -> str | None:
        """What to encode in front of a text that goes on, so that it gets no space; None where none is put."""
        if self._tokens_of("a")[:1] == "a":
            return None
        end = self._tokens_of("\na").removeprefix(self._tokens_of("\n"))
        return "\n" if end == "a" else None

    @cached_property
    def _anchor_ids(self) -> list[int]:
        return list(self._engine.encode(self._anchor or "", add_special_tokens=False).ids)

    def _tokens_of(self, text: str) -> str:
        return "".join(self._engine.encode(text, add_special_tokens=False).tokens)

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        bos: bool = True,
        neutralise: bool = True,
        going_on: Sequence[bool] | None = None,
    ) -> list[Ids]:
        """Ids of plain texts.

        Args:
            going_on: for each text, whether it stands behind another one, see `encode_pieces`.
            bos: put one beginning-of-sequence token in front, if that is the tokenizer's convention.
            neutralise: control tokens that a text spells out stay text; else they become the tokens.

        Returns:
            (n,) int32 each.

        Raises:
            TokenizerRefused: a second beginning-of-sequence token, or an id beyond the model's rows.
        """
        cuts = [self.cuts_of(text) if neutralise else [] for text in texts]
        front = [self.bos_id] if bos and self.adds_bos else []
        made = []
        for pieces in self.encode_pieces(texts, cuts, going_on):
            ids = [index for piece in pieces for index in piece.ids]
            if front and ids[:1] == front:  # a text that was rendered before, with its own
                ids = ids[1:]
            made.append(self.checked(np.array(front + ids, dtype=np.int32)))
        return made

    def encode_text(self, text: str, *, bos: bool = True, neutralise: bool = True) -> Ids:
        """Ids of one plain text, see `encode_texts`."""
        return self.encode_texts([text], bos=bos, neutralise=neutralise)[0]

    def checked(self, ids: Ids) -> Ids:
        """`ids`, if they hold at most one beginning-of-sequence token, in front, and the model has a row for each.

        Raises:
            TokenizerRefused: names the place and the id.
        """
        if self.adds_bos and len(ids) > 1:
            again = np.flatnonzero(ids[1:] == self.bos_id)
            if len(again):
                raise TokenizerRefused(
                    f"a second beginning-of-sequence token (id {self.bos_id}) at position {int(again[0]) + 1}.",
                    remedy="render with the template once, and do not pass neutralise=False for people's texts",
                )
        if self.vocab_rows is not None and len(ids) and int(ids.max()) >= self.vocab_rows:
            at = int(np.argmax(ids >= self.vocab_rows))
            raise TokenizerRefused(
                f"token id {int(ids[at])} ({self.hf.convert_ids_to_tokens(int(ids[at]))!r}) at position {at} "
                f"has no row: the model has {self.vocab_rows} rows, the tokenizer {len(self)} tokens.",
                remedy="resize the embeddings, or remove that token from the data",
            )
        return ids

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of ids, control tokens included, nothing cleaned up."""
        return str(self._engine.decode([int(index) for index in ids], skip_special_tokens=False))

    # Conversations

    @property
    def chat(self) -> ChatTemplate:
        """The chat template.

        Raises:
            TemplateRefused: the tokenizer has none.
        """
        if self.template is None:
            raise TemplateRefused(
                "the tokenizer has no chat template.", read_from=self.source, remedy="pass chat_template="
            )
        return self.template

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, neutralise: bool = True
    ) -> Ids:
        """What serving sends to the model for the next answer: the rendered conversation and the generation prompt.

        Where no text spells out control tokens these are the ids of `apply_chat_template(add_generation_prompt=True)`,
        with the tokenizer's beginning-of-sequence token in front where the template has none.
        """
        from bestiary.training.data.turns import cut_places

        text, cuts = cut_places(self.chat, messages, tools, prompt=True) if neutralise else (None, ())
        if text is None:
            text = self.chat.render(messages, tools, prompt=True)
        return self.encode_rendered(text, cuts)

    def encode_rendered(self, text: str, cuts: Sequence[int] = ()) -> Ids:
        """Ids of a text that a template rendered: its control tokens are tokens, except where cut; one BOS in front."""
        (pieces,) = self.encode_pieces([text], [cuts])
        return self.with_bos([index for piece in pieces for index in piece.ids])

    def with_bos(self, ids: list[int]) -> Ids:
        """Rendered ids with one beginning-of-sequence token in front, if that is the tokenizer's convention."""
        if self.adds_bos and ids[:1] != [self.bos_id] and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return self.checked(np.array(ids, dtype=np.int32))

    # Identity

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what AutoTokenizer reads, with the chat template that is rendered here, whosever it was."""
        own, self.hf.chat_template = self.hf.chat_template, self._rendered
        try:
            self.hf.save_pretrained(folder)
        finally:
            self.hf.chat_template = own

    def forget_fingerprint(self) -> None:
        """To be called after tokens were added: the fingerprint is made anew."""
        self.__dict__.pop("fingerprint", None)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What this tokenizer is; computed once."""
        file = Path(self.source) / "tokenizer.json" if self.source else None
        content = file.read_bytes() if file is not None and file.is_file() else self._engine.to_str()
        chat = None
        if self.template is not None:
            talk = [Message(role="user", content=PROBES[0]), Message(role="assistant", content=PROBES[2])]
            chat = digest_ids(self.encode_rendered(self.template.render(talk)).tolist())
        text = self.template.source + self.template.tool_source if self.template else None
        return Fingerprint(
            tokenizer=digest(content),
            template=None if text is None else digest(text),
            arguments=self.arguments.model_dump_json(exclude_none=True),
            probes=tuple(digest_ids(self.encode_text(probe).tolist())[:16] for probe in PROBES),
            chat=chat,
            vocabulary=len(self),
            pad=self.pad_id,
            bos=self.bos_id,
            stops=tuple(sorted(self.stop_ids)),
            versions=versions(),
        )


class _Behind:
    """An encoding without the anchor that stood in front of its text, as far as encodings are read here."""

    def __init__(self, encoding: Any, tokens: int, characters: int) -> None:
        self._encoding, self._tokens, self._characters = encoding, tokens, characters
        self.ids: list[int] = encoding.ids[tokens:]

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, place: int) -> int | None:
        """The token that holds a character of the text."""
        found = self._encoding.char_to_token(place + self._characters)
        return None if found is None else found - self._tokens

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """The characters of a token."""
        start, end = self._encoding.token_to_chars(token + self._tokens)
        return start - self._characters, end - self._characters


def _behind(encoding: Any, anchor: str, ids: list[int]) -> _Behind:
    """The encoding of what stands behind the anchor.

    Raises:
        SampleRefused: the anchor became one token with it.
    """
    if encoding.ids[: len(ids)] != ids:
        raise SampleRefused(
            "a text that goes on begins with what its tokenizer joins to a line break before it.",
            remedy="move the beginning of the completion to the end of its prompt",
        )
    return _Behind(encoding, len(ids), len(anchor))


def _halved(texts: Sequence[str]) -> SampleRefused | None:
    """What to say of the first text that no encoding has; None where all are texts."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = ascii(text[max(0, error.start - 20) : error.start + 20])
            return SampleRefused(
                f"half of a surrogate pair, U+{ord(text[error.start]):04X}, stands in the text near {near}.",
                remedy="write the file anew from texts that are whole; \\ud83d in JSON needs the half that follows it",
            )
    return None
