"""The tokenizer inside a GGUF file as `tokenizer.json` and `tokenizer_config.json`.

Two kinds are known, each by what the file itself says (`tokenizer.ggml.model`, `tokenizer.ggml.pre`):

* `llama` without a space prefix: Gemma's SentencePiece BPE. The file holds pieces and scores; the merges follow from
  them: every split of a piece into two pieces, best score first, then the longest left part, then the longest right
  part; user-defined pieces score 0, above all others. Runs of spaces are stored as spaces and mean runs of "▁".
* `gpt2` with a known pre-tokenizer: byte-level BPE whose merges the file lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bestiary.bridges.errors import CorruptCheckpoint, UnsupportedConfig

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_SPACE = "▁"

# tokenizer.ggml.pre → what splits text before byte-level BPE
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}


@dataclass(frozen=True, kw_only=True)
class GGUFTokens:
    """What a GGUF file says about its tokenizer; `metadata` keys start with `tokenizer.`, `source` is for messages."""

    architecture: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    merges: list[str]
    source: str

    def ggml(self, name: str, default: Any = None) -> Any:
        """The value of `tokenizer.ggml.<name>`."""
        return self.metadata.get(f"tokenizer.ggml.{name}", default)


def write_tokenizer(tokens: GGUFTokens, folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and, if the file holds one, `chat_template.jinja`.

    Raises:
        UnsupportedConfig: a tokenizer of another kind.
        CorruptCheckpoint: no tokens, or a special id beyond them.
    """
    tokenizer = build_tokenizer(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    stored = {name: _special(tokens, key) for name, key in names.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it stands
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **{name: piece for name, piece in stored.items() if piece is not None},
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if template := tokens.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def build_tokenizer(tokens: GGUFTokens) -> Tokenizer:
    """The tokenizer, beginning-of-sequence token included where the file asks for it.

    Raises:
        UnsupportedConfig: a tokenizer of another kind.
        CorruptCheckpoint: no tokens, or a special id beyond them.
    """
    if not tokens.tokens:
        raise CorruptCheckpoint(
            "metadata key tokenizer.ggml.tokens is missing.",
            read_from=tokens.source,
            remedy="use a GGUF file that carries its tokenizer",
        )
    kind = tokens.ggml("model")
    if kind == "llama" and not tokens.ggml("add_space_prefix", True):
        tokenizer = _gemma(tokens)
    elif kind == "gpt2" and tokens.ggml("pre") in _PRE_TOKENIZERS:
        tokenizer = _byte_level(tokens)
    else:
        raise UnsupportedConfig(
            "tokenizer.ggml.model",
            kind,
            f"(pre = {tokens.ggml('pre')!r}, add_space_prefix = {tokens.ggml('add_space_prefix', True)!r}) "
            "is a tokenizer the GGUF reader cannot rebuild.",
            read_from=tokens.source,
            remedy=f"take the tokenizer of the Hugging Face checkpoint, or use one of: llama without a space prefix, "
            f"gpt2 with pre in {sorted(_PRE_TOKENIZERS)}",
        )
    if tokens.ggml("add_eos_token", False):
        raise UnsupportedConfig(
            "tokenizer.ggml.add_eos_token",
            True,
            "is not implemented by the GGUF reader.",
            read_from=tokens.source,
            remedy="take the tokenizer of the Hugging Face checkpoint",
        )
    return tokenizer


def _gemma(tokens: GGUFTokens) -> Tokenizer:
    types, scores = tokens.ggml("token_type"), tokens.ggml("scores")
    pieces = [_SPACE * len(piece) if piece and not piece.strip(" ") else piece for piece in tokens.tokens]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    ranks = [0.0 if kind in (_CONTROL, _USER_DEFINED) else score for kind, score in zip(types, scores, strict=True)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, ranks),
            unk_token=_special(tokens, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(tokenizer, pieces, types)
    _add_bos(tokenizer, tokens)
    return tokenizer


def _merges(vocab: Mapping[str, int], ranks: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, in the order SentencePiece prefers them."""
    found: list[tuple[float, str, str]] = []
    for piece, index in vocab.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((ranks[index], left, right) for left, right in known)
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _byte_level(tokens: GGUFTokens) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(tokens.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in tokens.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[tokens.ggml("pre")]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens.tokens, tokens.ggml("token_type"))
    _add_bos(tokenizer, tokens)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, pieces: list[str], types: list[int]) -> None:
    """Control tokens (special) and user-defined ones, matched whole in the raw text."""
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind == _CONTROL)
            for piece, kind in zip(pieces, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _add_bos(tokenizer: Tokenizer, tokens: GGUFTokens) -> None:
    """Puts the beginning-of-sequence token in front where the file says so; Gemma talks nonsense without it."""
    bos = _special(tokens, "bos")
    if tokens.ggml("add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, tokens.ggml("bos_token_id"))],
        )


def _special(tokens: GGUFTokens, name: str) -> str | None:
    """The piece of `<name>_token_id`, or None when the file names none."""
    index = tokens.ggml(f"{name}_token_id")
    if index is None:
        return None
    if index >= len(tokens.tokens):
        raise CorruptCheckpoint(
            f"tokenizer.ggml.{name}_token_id = {index} is beyond the {len(tokens.tokens)} tokens.",
            read_from=tokens.source,
            remedy="fetch the file again",
        )
    return tokens.tokens[index]
