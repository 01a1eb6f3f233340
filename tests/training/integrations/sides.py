"""The same tiny tied model twice, ours and transformers' (with LoRA PEFT's), and what their first step saw."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

from bestiary.models import AutoDecoder, Decoder, LoRAConfig
from bestiary.models.lora import sites
from bestiary.models.sharding import put, whole
from bestiary.training.integrations.example import Row
from bestiary.verify.reference import promoted

from ...bridges.checkpoints import reference_model, tiny_config

VOCAB = 203  # the head computes in 256 columns
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
LORA = LoRAConfig(r=3, alpha=6.0, targets=("*_proj",))


def checkpoint(folder: Path) -> Path:
    """A float64 checkpoint of Qwen3 with tied embeddings."""
    config = tiny_config("qwen3", vocab_size=VOCAB, tie_word_embeddings=True, num_hidden_layers=2)
    with promoted():
        reference_model(config, torch.float64).save_pretrained(folder)
    return folder


def rows(count: int = 24) -> list[Row]:
    """Of different lengths; the first tokens of each do not count."""
    generator = torch.Generator().manual_seed(3)
    made: list[Row] = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (4 + index % 7,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * (index % 3) + ids[index % 3 :]})
    return made


def written(folder: Path) -> Path:
    """The rows as a JSONL file."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return file


def ours(src: Path, lora: bool = False) -> Decoder:
    """Our model; adapters that do something."""
    model = AutoDecoder.from_pretrained(src, lora=LORA if lora else None).train()
    moved(model)
    return model


def moved(model: Decoder) -> None:
    """Give fresh adapters values other than zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in sites(model):
            if site.adapter is not None:
                lora_b = site.adapter.lora_B
                put(lora_b, torch.empty(lora_b.shape, dtype=lora_b.dtype).normal_(0.0, 0.3, generator=generator))


def theirs(src: Path, adapter: Path | None = None) -> Any:
    """transformers' model, under PEFT's adapter if one is given."""
    with promoted():
        model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.float64, attn_implementation="eager")
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = PeftModel.from_pretrained(model, adapter, is_trainable=True).double()
    model.config.use_cache = False  # with a cache transformers does not look for packed documents
    return model.train()


def pair(src: Path, folder: Path, lora: bool) -> tuple[Decoder, Any]:
    """Both."""
    mine = ours(src, lora)
    return mine, theirs(src, mine.save_pretrained(folder / "start") if lora else None)


def our_name(name: str) -> str:
    """Of a parameter that PEFT, DDP or another wrapper named."""
    for part in ("base_model.model.", "module.", ".base_layer", ".default.weight"):
        name = name.replace(part, "") if not name.startswith(part) else name.removeprefix(part)
    return name


@contextmanager
def first_gradients(model: nn.Module, prefix: str = "") -> Iterator[dict[str, Tensor]]:
    """Filled with the gradients that the first step of any optimiser finds, by our names (`prefix` is taken off)."""
    found: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not found:
            named = ((our_name(name.removeprefix(prefix)), parameter) for name, parameter in model.named_parameters())
            found.update({name: whole(p.grad).clone() for name, p in named if p.grad is not None})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All tensors, by name."""
    assert found.keys() == expected.keys()
    assert expected
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def reloads(folder: Path, model: Decoder, base: Path | None = None) -> None:
    """An export gives in transformers (an adapter: in PEFT, on `base`) the logits of `model`."""
    ids = torch.tensor([rows(1)[0]["input_ids"]])
    hf = theirs(folder) if base is None else theirs(base, folder)
    with torch.no_grad(), promoted():
        torch.testing.assert_close(model(ids).logits, hf(ids).logits, rtol=1e-5, atol=1e-6)
