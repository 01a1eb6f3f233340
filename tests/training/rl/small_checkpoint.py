"""A model that is small and has a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from bestiary.models import Qwen3
from bestiary.verify.weights import perturb

from ...models.tiny import tiny_config

PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6], [5, 9, 2]]


def small(dtype: torch.dtype = torch.float64, seed: int = 0) -> Qwen3:
    """Two layers, 64 positions."""
    config = tiny_config("qwen3", tie_word_embeddings=False)
    model = Qwen3(
        config.with_(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            layer_types=config.layer_types[:2],
            max_position_embeddings=64,
            attention=replace(config.attention, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25),
            rope=replace(config.rope, rotary_dim=16),
        ),
        dtype=dtype,
    )
    perturb(model, seed=seed)
    return model


def stored(folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """The checkpoint of `small(seed=0)`."""
    return small(dtype).save_pretrained(folder)
