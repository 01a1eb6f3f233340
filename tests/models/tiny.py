"""The four families at toy size, with weights that hide nothing."""

from dataclasses import replace
from typing import Any

import torch

from bestiary.models import Decoder, DecoderConfig, Gemma3, GptOss, Qwen3, Qwen3MoE
from bestiary.models.config import LinearScaling, Rope
from bestiary.verify.weights import perturb

FAMILIES: dict[str, type[Decoder]] = {"qwen3": Qwen3, "gemma3": Gemma3, "qwen3_moe": Qwen3MoE, "gpt_oss": GptOss}
VOCAB, WINDOW = 203, 7
LAYERS = {"qwen3": 3, "gemma3": 7, "qwen3_moe": 3, "gpt_oss": 3}


def tiny_config(family: str, **changes: Any) -> DecoderConfig:
    """The first published size of a family, every dimension small; the pattern of windows stays."""
    full_size = next(iter(FAMILIES[family].sizes.values()))
    layers = LAYERS[family]
    moe = full_size.moe
    small = full_size.with_(
        vocab_size=VOCAB,
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=layers,
        layer_types=full_size.layer_types[:layers],
        sliding_window=None if full_size.sliding_window is None else WINDOW,
        attention=replace(full_size.attention, num_heads=4, num_kv_heads=2, head_dim=24),
        rope=replace(full_size.rope, rotary_dim=24),
        moe=moe and replace(moe, num_experts=12, intermediate_size=36, router=replace(moe.router, top_k=3)),
        dense_layers=(1,) if family == "qwen3_moe" else (),
    )
    if family == "gemma3":
        small = small.with_(
            rope=Rope(theta=1e6, rotary_dim=24, scaling=LinearScaling(factor=8.0)),
            sliding_rope=Rope(theta=1e4, rotary_dim=24),
        )
    return small.with_(**changes)


def tiny(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """A model of the family with non-trivial norms, biases and sinks, in eval mode."""
    model = FAMILIES[family](tiny_config(family, **changes), dtype=dtype)
    perturb(model, seed=0)
    return model.eval()


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, the last of the vocabulary among them."""
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[0, -1] = VOCAB - 1
    return ids
