"""Tiny transformers checkpoints of architectures for the fallback backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bestiary.bridges.hf_fallback import FallbackWarning
from bestiary.models import AutoDecoder

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 211
_SHAPE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
# What each is here for: a head with a bias; nothing special; a scaled tied head; no position_ids; soft caps and a
# window; experts; a bridge of its own; transposed weights.
TINY: dict[str, dict[str, Any]] = {
    "phi": _GROUPED,
    "gpt_neox": _SHAPE,
    "cohere": {**_GROUPED, "logit_scale": 0.3},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
    "gemma2": {**_GROUPED, "head_dim": 12, "final_logit_softcapping": 2.0, "sliding_window": 6},
    "dots1": {**_GROUPED, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24},
    "qwen3": {**_GROUPED, "head_dim": 12},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
}
FAMILIES = sorted(TINY.keys() - {"dots1", "qwen3"})


def checkpoint(folder: Path, model_type: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Path:
    """A folder written by transformers, every parameter random."""
    target = folder / "-".join([model_type, *map(str, changes.values())])
    if target.exists():
        return target
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(
        model_type, **{"vocab_size": VOCAB, **ids, **TINY[model_type], **changes}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(target)
    return target


def wrapped(folder: Path, **options: Any) -> Any:
    """The checkpoint on the fallback backend, its warning expected."""
    with pytest.warns(FallbackWarning, match="fallback backend"):
        return AutoDecoder.from_pretrained(folder, backend="hf", **options)


def reference(folder: Path) -> Any:
    """The checkpoint in transformers, every key found and none left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert {kind: found for kind, found in info.items() if found} == {}
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids, none of them special."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def expected_log_probs(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p(target) from logits, 0 where the target is ignored."""
    chosen = (logits / temperature).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == -100, 0.0)


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The target at each position."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
