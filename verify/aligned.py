"""Configs for level K: small, and aligned as optimised kernels ask for it, unlike the tiny ones.

Head size 64, rows of every matrix multiples of 16 bytes in bfloat16. The vocabulary is wider than one tile of the
log-prob core and 0, 1 or 63 words past a multiple of 64, where padded columns would show. Windows are narrower and
wider than a block of queries, in layers beside others that see everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bestiary.verify.reference import reference_class
from bestiary.verify.tiny import (
    FULL,
    ROPE,
    SLIDING,
    THETA,
    Raw,
    config_defaults,
    fitted,
    pad_inside,
    readable_fields,
    rope_layer_types,
)

HEAD_DIM = 64
BATCH, LENGTH = 2, 150  # several blocks of queries a row, and more than the narrow window

BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": [SLIDING, FULL],
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
    "query_pre_attn_scalar": HEAD_DIM,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": HEAD_DIM // 2,
    "qk_rope_head_dim": HEAD_DIM // 2,
    "v_head_dim": 48,
    "final_logit_softcapping": 8.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.9,
    "swiglu_limit": 7.0,  # out of reach
    "swiglu_alpha": 1.3,
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "vocab+0": {"vocab_size": 2048 + 64},
    "vocab+1": {  # one KV head per head, a window wider than a block, one layer without experts, no soft cap
        "vocab_size": 2048 + 65,
        "num_key_value_heads": 4,
        "sliding_window": 72,
        "layer_types": [FULL, SLIDING],
        "mlp_only_layers": [1],
        "v_head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "final_logit_softcapping": None,
        "swiglu_limit": 0.5,
    },
    "vocab+63": {  # one KV head for all, no window
        "vocab_size": 2048 + 63,
        "q_lora_rank": None,
        "num_key_value_heads": 1,
        "use_sliding_window": False,
        "layer_types": [FULL, FULL],
        "tie_word_embeddings": True,
    },
}


def _rope(reference: str) -> Raw:
    plain = {"rope_type": "default", **ROPE["default"]}
    nested = rope_layer_types(reference)
    if nested:
        return {name: {**plain, "rope_theta": THETA[name]} for name in nested}
    return {**plain, "rope_theta": THETA[None]}


def aligned_configs(reference: str) -> dict[str, Raw]:
    """config.json content by variant, for any reference class; a field that the class does not read is left out."""
    readable = readable_fields(reference)
    found = {}
    for variant, changes in VARIANTS.items():
        raw: Raw = {name: value for name, value in {**BASE, **changes}.items() if readable(name)}
        if "tie_word_embeddings" in changes:
            raw["tie_word_embeddings"] = changes["tie_word_embeddings"]
        raw = fitted(reference, raw)
        raw["model_type"] = reference_class(reference).config_class.model_type
        raw["rope_parameters"] = _rope(reference)
        pad_inside(raw, config_defaults(reference))
        found[variant] = raw
    return found
