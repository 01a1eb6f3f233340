"""The task of `make demo-rl`: five digits in, the same digits in ascending order out, one token a character.

    47318=13478

The warm start imitates a careless writer: in six of ten answers two neighbours change places. It teaches what an
answer looks like and how sorting goes, and mistakes with it. The verifier takes none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bestiary.tools.demo_rl_trial import DEMONSTRATIONS, HELD_OUT, PROMPTS, Row, Task, write_rows

CHARACTERS = "0123456789="
PAD, END = "<pad>", "<end>"
DIGITS = 5
CACHE_BYTES = 1 << 26  # of vLLM, far more than such short answers need


@dataclass(frozen=True, kw_only=True)
class Sorting(Task):
    """How much of everything, beside what every `Task` has.

    Attributes:
        demonstrations: answers to imitate.   careless: share of them with a mistake.
        prompts: of reinforcement learning.   engine: that samples, embedded or vllm.
        hidden, layers: of the model.   warm_steps, warm_rate: of the imitation.
    """

    demonstrations: int = 4000
    careless: float = 0.6
    prompts: int = 4000
    held_out: int = 200
    hidden: int = 96
    layers: int = 3
    warm_steps: int = 250
    warm_rate: float = 2e-3
    rounds: int = 100
    round_prompts: int = 16
    answers: int = 8
    rate: float = 3e-4
    engine: str = "embedded"
    title: str = f"Mean reward: {DIGITS} digits in ascending order"
    schema: str = "bestiary.demo_rl/1"
    max_tokens: int = DIGITS + 2

    def write(self, folder: Path, seed: int) -> None:
        """See `Task`; also `random/`, the model with its tokenizer."""
        drawn = random.Random(seed)
        numbers = drawn.sample(range(10**DIGITS), self.demonstrations + self.prompts + self.held_out)
        every = [f"{number:0{DIGITS}d}" for number in numbers]
        shown, asked = every[: self.demonstrations], every[self.demonstrations :]
        write_rows(folder / DEMONSTRATIONS, [_row(digits, answer(digits, self.careless, drawn)) for digits in shown])
        rows = [_row(digits, "".join(sorted(digits))) for digits in asked]
        write_rows(folder / PROMPTS, rows[: self.prompts])
        write_rows(folder / HELD_OUT, rows[self.prompts :])
        write_model(folder / "random", self.hidden, self.layers, seed)

    def imitation(self, folder: Path, out: Path, seed: int) -> dict[str, Any]:
        """See `Task`."""
        return {
            "recipe": "sft",
            "model": {"src": str(folder / "random")},
            "data": self._data(folder / "random", folder / DEMONSTRATIONS, seed) | {"streams": 2},
            "optim": {"lr": self.warm_rate, "warmup": 0.1},
            "loop": {"steps": self.warm_steps, "workers": 0, "seed": seed},
            "checkpoint": {"every": None},
            "out": str(out),
        }

    def learning(self, base: Path, folder: Path, seed: int) -> dict[str, Any]:
        """See `Task`."""
        given = self.common(folder, seed)
        vllm = {"options": {"cache_bytes": CACHE_BYTES}} if self.engine == "vllm" else {}
        return given | {
            "model": {"src": str(base)},
            "data": self._data(base, folder / PROMPTS, seed),
            "rollouts": given["rollouts"] | {"engine": self.engine, **vllm},
        }

    def _data(self, base: Path, file: Path, seed: int) -> dict[str, Any]:
        return {
            "tokenizer": {"src": str(base)},
            "sources": [{"name": "digits", "files": str(file), "kind": "completion"}],
            "pack_length": 512,
            "seed": seed,
        }


def _row(digits: str, completion: str) -> Row:
    return {"prompt": f"{digits}=", "completion": completion}


def answer(digits: str, careless: float, drawn: random.Random) -> str:
    """The digits in order, or with probability `careless` two unequal neighbours the wrong way round."""
    made = sorted(digits)
    unequal = [place for place in range(len(made) - 1) if made[place] != made[place + 1]]
    if unequal and drawn.random() < careless:
        place = drawn.choice(unequal)
        made[place : place + 2] = made[place + 1], made[place]
    return "".join(made)


def write_model(folder: Path, hidden: int, layers: int, seed: int) -> None:
    """A small Qwen3 with random weights, and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from bestiary.models import Qwen3

    pieces = [PAD, END, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    full = Qwen3.sizes["0.6b"]
    config = full.with_(
        vocab_size=len(pieces),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        layer_types=full.layer_types[:layers],
        max_position_embeddings=64,
        attention=replace(full.attention, num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5),
        rope=replace(full.rope, rotary_dim=32),
        initializer_range=hidden**-0.5,
        tie_word_embeddings=False,
    )
    model = Qwen3(config, dtype=torch.float32)
    model.init_weights(seed)
    model.save_pretrained(folder, overwrite=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD).save_pretrained(folder)
