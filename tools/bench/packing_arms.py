"""The ways to batch texts that `packing` compares: documents in, arguments of a forward call out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder, Qwen3
from bestiary.training.data.batch import batch
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.packing import Candidate, Pack, Packer, assemble
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Cursor, Source
from bestiary.training.data.tokens import IGNORED, Tokens

VOCAB = 4096  # ids are folded into it: the head's cost is not what is compared
PACK = 4096  # tokens; also the longest document
HIDDEN, LAYERS = 256, 4
FLAT = 256  # tokens of every document of the control without skew

Batch = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One micro-batch: the arguments of `forward` and the tokens in it that are no padding."""

    arguments: Batch
    useful: int


@dataclass(frozen=True)
class FoldedEncoder:
    """An encoder of rows whose ids are folded into `VOCAB`, cut to `PACK` or to `length`, which all then have."""

    encode: Any
    length: int | None = None

    def __call__(self, row: Any) -> Tokens:
        """One row. ValueError where it is shorter than `length`."""
        found = self.encode(row)
        if self.length is not None and len(found) < self.length:
            raise ValueError(f"{len(found)} tokens, {self.length} are wanted")
        cut = slice(0, PACK if self.length is None else self.length)
        ids, trained = found.input_ids[cut] % VOCAB, found.labels[cut] != IGNORED
        return Tokens(ids, np.where(trained, ids, IGNORED).astype(np.int32))


def encoder(tokenizer: Path) -> FoldedEncoder:
    """Rows of the T0 subset as a question and an answer in the tokenizer's template."""
    from bestiary.training.data.encode import RowEncoder
    from bestiary.training.data.tokenizer import BaseHFModelTokenizer

    layer = BaseHFModelTokenizer.from_pretrained(tokenizer)
    return FoldedEncoder(RowEncoder(tokenizer=layer, kind="completion", as_chat=True))


def documents(file: Path, encode: FoldedEncoder, rows: int | None) -> list[Tokens]:
    """The first `rows` documents of a file that can be encoded, or all."""
    found: list[Tokens] = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            if rows is not None and len(found) == rows:
                break
            try:
                found.append(encode(json.loads(line)))
            except (ValueError, BestiaryError):
                continue  # counted by what is missing; every arm gets the same documents
    return found


def padded(group: Sequence[Tokens]) -> Work:
    """Rows as long as the longest."""
    longest = max(map(len, group))
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    labels = torch.full((len(group), longest), IGNORED)
    mask = torch.zeros(len(group), longest, dtype=torch.long)
    for row, one in enumerate(group):
        ids[row, : len(one)] = torch.from_numpy(one.input_ids)
        labels[row, : len(one)] = torch.from_numpy(one.labels)
        mask[row, : len(one)] = 1
    return Work({"input_ids": ids, "attention_mask": mask, "labels": labels}, sum(map(len, group)))


def in_order(made: Sequence[Tokens], size: int) -> list[Work]:
    """Padded batches of `size` documents as they come."""
    return [padded(made[start : start + size]) for start in range(0, len(made) - size + 1, size)]


def by_length(made: Sequence[Tokens], size: int, count: int) -> list[Work]:
    """Padded batches of documents sorted by length; of all of them, the `count` at equal steps of their tokens' sum."""
    ordered = sorted(made, key=len)
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    sums = np.cumsum([sum(map(len, group)) for group in groups])
    places = np.searchsorted(sums, sums[-1] * (np.arange(count) + 0.5) / count)
    return [padded(groups[place]) for place in places]


def flattened(made: Sequence[Tokens], size: int) -> list[Work]:
    """transformers' DataCollatorWithFlattening over `size` documents."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_tensors="pt")
    works = []
    for start in range(0, len(made) - size + 1, size):
        group = made[start : start + size]
        rows = [{"input_ids": one.input_ids.tolist(), "labels": one.labels.tolist()} for one in group]
        works.append(Work(dict(collate(rows)), sum(map(len, group))))
    return works


def trl_bfd(made: Sequence[Tokens], count: int) -> list[Work]:
    """TRL's best-fit-decreasing packing of all documents, `count` of its rows, through TRL's padding-free collator."""
    from datasets import Dataset
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = Dataset.from_dict(
        {
            "input_ids": [one.input_ids.tolist() for one in made],
            "labels": [one.labels.tolist() for one in made],
        }
    )
    packed = pack_dataset(rows, PACK, "bfd")
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    works = []
    for place in range(min(count, len(packed))):
        row = packed[place * len(packed) // count]
        found = {
            name: value for name, value in collate([row]).items() if name in {"input_ids", "labels", "position_ids"}
        }
        works.append(Work(found, len(row["input_ids"])))
    return works


def alone(made: Sequence[Tokens]) -> list[Work]:
    """Every document in a call of its own."""
    return [padded([one]) for one in made]


def loader(file: Path, encode: FoldedEncoder, *, streams: int = 1, workers: int = 1) -> PackLoader:
    """Ours: read, encode, and pack ahead in another process."""
    source = Source(name="t0", files=str(file), encode=encode, shuffle=False, on_corrupt="skip", max_corrupt=100_000)
    plan = Plan(sources=(source,), pack_length=PACK, pad_id=0, streams=streams, overflow="truncate")
    return PackLoader(plan, workers=workers, make=work_of)


def work_of(pack: Pack) -> Work:
    """A pack as one micro-batch."""
    return Work(batch(pack), pack.useful_tokens)


def packed(made: Sequence[Tokens]) -> list[Work]:
    """Ours over documents in memory."""
    waiting = iter(Candidate(place, "", place, Cursor(), 0, (one,)) for place, one in enumerate(made))
    packer = Packer(PACK, 100, lambda: next(([one] for one in waiting), None))
    return [work_of(assemble(chosen, PACK, 0)) for chosen in iter(packer.next, [])]


def our_model() -> Decoder:
    """Four layers in Qwen3's shape, fp32."""
    full = Qwen3.sizes["0.6b"]
    config = full.with_(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        layer_types=full.layer_types[:LAYERS],
        attention=replace(
            full.attention, num_heads=4, num_kv_heads=2, head_dim=HIDDEN // 4, scale=(HIDDEN // 4) ** -0.5
        ),
        rope=replace(full.rope, rotary_dim=HIDDEN // 4),
    )
    return Qwen3(config, dtype=torch.float32)


def their_model() -> Any:
    """The same shape in transformers, with its SDPA attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)
