"""Checkpoint folders with a tokenizer, at toy size: what the scripts take, and transformers' model of the same file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from bestiary.models import Decoder

from ...models.tiny import FAMILIES, VOCAB, tiny_config

FAMILIES_HERE = ("gemma3", "qwen3_moe")  # tied with a scaled embedding; experts
WORDS = [f"w{n}" for n in range(VOCAB - 4)]


def write_checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model of two layers over 203 words (no multiple of 64), weights on a scale at which losses move."""
    config = tiny_config(family)
    config = config.with_(
        num_hidden_layers=2, layer_types=config.layer_types[:2], hidden_size=32, intermediate_size=48, dense_layers=()
    )
    if config.embedding_multiplier != 1.0:
        config = config.with_(embedding_multiplier=config.hidden_size**0.5)
    attention = replace(config.attention, num_heads=4, num_kv_heads=2, head_dim=24, scale=24**-0.5)
    moe = config.moe and replace(config.moe, num_experts=4, intermediate_size=20)
    torch.manual_seed(1)
    model = FAMILIES[family](config.with_(attention=attention, moe=moe), dtype=dtype)
    model.init_weights(seed=3)
    model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id = 0, 1, None
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Words separated by blanks; pad 0, end of text 1, unknown 2."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(count: int, seed: int) -> str:
    """`count` words, the same for the same seed."""
    drawn = torch.randint(0, len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[n] for n in drawn.tolist())


def write_rows(file: Path, rows: list[Mapping[str, Any]]) -> Path:
    """A JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def hub_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """Hub names and values, adapters folded in."""
    return {name: tensor.clone() for name, tensor in model.named_hf_tensors()}
