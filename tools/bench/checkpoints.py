"""Checkpoints with random weights, written once and loaded by every arm, so that all compute with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Published figures, of which one layer in `period` is full; "tiny" only proves that a benchmark runs.
GEMMA3: dict[str, dict[str, int]] = {
    "270m": {"vocab": 262144, "hidden": 640, "mlp": 2048, "layers": 18, "heads": 4, "kv": 1, "dim": 256, "window": 512}
    | {"period": 6},
    "tiny": {"vocab": 1024, "hidden": 64, "mlp": 128, "layers": 2, "heads": 4, "kv": 1, "dim": 32, "window": 16}
    | {"period": 2},
}


def write_random(folder: Path, config: Any, model: type[Any], seed: int = 0) -> None:
    """Writes normal(0, 0.02) weights in bf16 under a transformers config.

    Args:
        folder: created.   config: a transformers config.   model: its class, built without memory for names and shapes.
    """
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in model(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(
        {
            name: torch.empty(wanted, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
            for name, wanted in shapes.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_gemma3(folder: Path, size: str, seed: int = 0) -> None:
    """A Gemma 3 text checkpoint in the shape of `GEMMA3[size]`: tied head, the last layer of a period full."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = GEMMA3[size]
    config = Gemma3TextConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["dim"],
        query_pre_attn_scalar=shape["dim"],
        sliding_window=shape["window"],
        layer_types=["full_attention" if full else "sliding_attention" for full in _full_layers(shape)],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Gemma3ForCausalLM"],
    )
    write_random(folder, config, Gemma3ForCausalLM, seed)


def linear_parameters(shape: dict[str, int]) -> int:
    """Weights of all linear layers of the blocks."""
    heads = shape["hidden"] * shape["dim"] * (2 * shape["heads"] + 2 * shape["kv"])
    return shape["layers"] * (heads + 3 * shape["hidden"] * shape["mlp"])


def visible_pairs(shape: dict[str, int], tokens: int) -> int:
    """Query-key pairs that the masks leave, over all layers."""
    window = min(shape["window"], tokens)
    full = tokens * (tokens + 1) // 2
    sliding = window * (window + 1) // 2 + (tokens - window) * window
    full_layers = sum(_full_layers(shape))
    return full_layers * full + (shape["layers"] - full_layers) * sliding


def _full_layers(shape: dict[str, int]) -> list[bool]:
    """Of each layer whether its attention is full."""
    return [(index + 1) % shape["period"] == 0 for index in range(shape["layers"])]
