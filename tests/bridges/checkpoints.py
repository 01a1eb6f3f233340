"""Tiny Hugging Face checkpoints to bridge, and the listings of published ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from bestiary.bridges import TensorInfo
from bestiary.bridges.storage import DTYPES

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SHAPE = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "hidden_size": 80}
TINY: dict[str, dict[str, Any]] = {
    "qwen3": {**SHAPE, "intermediate_size": 112},
    "gemma3_text": {**SHAPE, "intermediate_size": 112, "sliding_window": 7, "query_pre_attn_scalar": 31},
    "qwen3_moe": {
        **SHAPE,
        "intermediate_size": 112,
        "moe_intermediate_size": 48,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        **SHAPE,
        "intermediate_size": 72,
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
    },
}
FAMILIES = sorted(TINY)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small transformers config of a family, its dims pairwise different, 12 experts, one dense layer in the MoE."""
    return transformers.AutoConfig.for_model(model_type, **{"vocab_size": 1003, **TINY[model_type], **changes})


def multimodal_config() -> Any:
    """A small Gemma 3 with a vision tower, whose layers have names that the text model's have too."""
    return transformers.Gemma3Config(
        text_config=tiny_config("gemma3_text", vocab_size=1024).to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=1010,
    )


def reference_model(config: Any, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """The transformers model of `config`, every parameter random (norms, biases and sinks too)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def reload(folder: Path, **options: Any) -> Any:
    """A checkpoint in transformers, which must find every key it wants, no other, and every shape right."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    assert {kind: found for kind, found in info.items() if found} == {}
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of the object in a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a published checkpoint, whatever the file is called."""
    names = ("config.json", "config.extracted.json", "config.to_dict.json")
    content: dict[str, Any] = json.loads(next(folder / name for name in names if (folder / name).exists()).read_text())
    return content


def read_listing(folder: Path) -> dict[str, TensorInfo] | None:
    """Names, shapes and dtypes of a published checkpoint, from its `tensors.json`."""
    if not (folder / "tensors.json").exists():
        return None
    found: dict[str, TensorInfo] = {}
    for group in json.loads((folder / "tensors.json").read_text())["groups"]:
        info = TensorInfo(tuple(group["shape"]), DTYPES[group["dtype"]])
        for layer in group.get("layers", [""]):
            for expert in range(group["experts"]) if "experts" in group else [""]:
                found[group["name"].format(l=layer, e=expert)] = info
    return found


def read_index(folder: Path) -> list[str] | None:
    """Names of a published checkpoint, from its shard index."""
    path = folder / "model.safetensors.index.json"
    if path.exists():
        return sorted(json.loads(path.read_text())["weight_map"])
    zipped = path.with_name(path.name + ".gz")
    return sorted(json.loads(gzip.decompress(zipped.read_bytes()))["weight_map"]) if zipped.exists() else None
