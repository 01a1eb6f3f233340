"""Tiny configs of a family, derived from its Hugging Face config class: small, awkward and active.

Dimensions differ pairwise and none is a multiple of 64, so that a transposition or a leaked pad is a shape error; one
config is square instead, where only values can tell. Windows, soft caps and clamps are narrow enough to act, every
layer type stands at an even and an odd index, hidden 80 has no square root in bfloat16. Values are keyed by field name
and apply wherever a config class has the field: no family is named here.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from bestiary.verify.reference import build, hf_config, reference_class

Raw = dict[str, Any]

WINDOW = 16
ORIGINAL_CONTEXT = 64
LENGTH = 72  # of the main probe: beyond 4 windows and the original context

FULL, SLIDING = "full_attention", "sliding_attention"

BASE: Mapping[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 80,
    "intermediate_size": 112,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 52,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 8192,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "first_k_dense_replace": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "clip_qkv": 0.8,
    "q_lora_rank": 44,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 22,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
    "query_pre_attn_scalar": 17,
    "final_logit_softcapping": 8.0,  # a tied head of width 80 gives logits of about that size
    "attn_logit_softcapping": 0.6,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.9,
    "swiglu_limit": 0.5,
    "swiglu_alpha": 1.3,
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "mha": {  # one KV head per head, large eps, irregular layers, the other setting of the tie, a pad token in the text
        "pad_token_id": 7,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-3,
        "layer_norm_eps": 1e-3,
        "num_hidden_layers": 5,
        "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
        "sliding_window": 9,
        "norm_topk_prob": False,
        "final_logit_softcapping": None,
        "swiglu_alpha": 1.702,
        "clip_qkv": None,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "use_qk_norm": False,
    },
    "mqa": {  # one KV head for all, no window where the family can do without, 2·I = H, a vocabulary that needs no pad
        "vocab_size": 128,
        "num_key_value_heads": 1,
        "intermediate_size": 40,
        "moe_intermediate_size": 40,
        "use_sliding_window": False,
        "num_experts_per_tok": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "v_head_dim": 40,
    },
    "square": {  # every matrix of attention and MLP is 80 × 80; the rest is left to Hugging Face's defaults
        "vocab_size": 80,
        "hidden_size": 80,
        "intermediate_size": 80,
        "moe_intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 20,
        "attention_multiplier": 0.25,  # with Granite's default of 1 a softmax is so sharp that fp32 rounding shows
        "num_experts": 12,
        "num_local_experts": 12,
        "n_routed_experts": 16,  # a multiple of every default number of groups
        "num_experts_per_tok": 3,
    },
}
FROM_DEFAULTS = ("square",)
DECLARED_ALONE = frozenset({"layer_norm_eps"})
"""Fields that a modelling file may read of another config: of its vision part."""
ONLY_WHERE_SET = frozenset({"attn_logit_softcapping"})
"""Fields that some classes read and never use: they are set only where the class's own default is not null."""

THETA = {FULL: 5000.0, SLIDING: 300.0, None: 5000.0}

ROPE: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "yarn": {
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "longrope": {  # list lengths follow from the coordinates that turn: see `scaling`
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "short_factor": [],
        "long_factor": [],
    },
    "proportional": {"partial_rotary_factor": 0.4},
}
"""Parameters that make each RoPE type act at the probe's length; the bounds of YaRN's ramp fall inside the head."""


def scaling(rope_type: str, turning: int) -> Raw:
    """`rope_parameters` of one layer type without theta, active in a head of which `turning` coordinates turn."""
    values: Raw = {"rope_type": rope_type, **ROPE[rope_type]}
    if rope_type == "longrope":
        half = turning // 2
        values["short_factor"] = [1.0 + 0.05 * i for i in range(half)]
        values["long_factor"] = [2.0 + 0.25 * i for i in range(half)]
    return values


def config_defaults(reference: str) -> Raw:
    """What the config class says when it is given nothing."""
    return copy.deepcopy(_defaults(reference))


@cache
def _defaults(reference: str) -> Raw:
    defaults: Raw = hf_config(reference, {}).to_dict()
    return defaults


@cache
def readable_fields(reference: str) -> Callable[[str], bool]:
    """A test for a name: declared by the config class, or read from the config by the modelling file."""
    cls = reference_class(reference)
    declared = {item.name for item in dataclasses.fields(cls.config_class)}
    source = inspect.getsource(importlib.import_module(cls.__module__))

    @cache
    def readable(name: str) -> bool:
        if name in declared or name in DECLARED_ALONE:
            return name in declared
        read = re.search(rf'config(\.|, "){name}\b', source) is not None
        return read and (name != "head_dim" or _free_heads(reference))

    return readable


def builds(reference: str, raw: Raw) -> bool:
    """Whether the config class takes `raw`."""
    try:
        hf_config(reference, raw)
    except (StrictDataclassError, ValueError, KeyError):
        return False
    return True


def _free_heads(reference: str) -> bool:
    """Whether a head_dim that the class does not declare may differ from hidden / heads, which some validators read."""
    sizes = {name: BASE[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    longrope = {**scaling("longrope", BASE["head_dim"]), "rope_theta": THETA[None]}
    return builds(reference, {**sizes, "rope_parameters": longrope})


@cache
def layer_count(reference: str) -> int:
    """Two periods of the family's layer pattern plus one, at least five."""
    types = hf_config(reference, {"num_hidden_layers": 48, "max_window_layers": 48}).to_dict().get("layer_types")
    if not types or len(set(types)) == 1:
        return 5
    period = next(p for p in range(1, 49) if all(types[i] == types[i % p] for i in range(48)))
    return max(5, 2 * period + 1) if period <= 16 else 5


def rope_layer_types(reference: str) -> list[str]:
    """Layer types that have RoPE parameters of their own; empty where one set serves all."""
    parameters = config_defaults(reference).get("rope_parameters") or {}
    return [name for name, value in parameters.items() if isinstance(value, dict)]


def turning_dim(reference: str, raw: Raw) -> int:
    """Coordinates of a head that turn, by the class's own share."""
    if "qk_rope_head_dim" in raw:
        return int(raw["qk_rope_head_dim"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    share = (config_defaults(reference).get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    return int(head_dim * share)


@cache
def _takes_head_dim(reference: str) -> bool:
    """Whether heads may have another size than hidden_size / heads: stated by the class, or read and borne."""
    readable, config_class = readable_fields(reference), reference_class(reference).config_class
    if any(item.name == "head_dim" for item in dataclasses.fields(config_class)):
        return True
    if not readable("head_dim") or "head_dim" in config_defaults(reference):  # or the class derives it
        return False
    defaults = config_defaults(reference)
    unused = {name for name in ONLY_WHERE_SET if defaults.get(name) is None}
    raw = {name: value for name, value in BASE.items() if readable(name) and name not in unused}
    tried = fitted(reference, {**raw, "num_hidden_layers": 2}, checked=True)
    pad_inside(tried, defaults)
    model = build(reference, tried, torch.float32)
    try:
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.int64))
    except RuntimeError:  # a norm over all heads that has the width of the model
        return False
    return True


def fitted(reference: str, raw: Raw, *, checked: bool = False) -> Raw:
    """`raw` without second names of a field and windows that no mask has, and with heads that the class can have.

    A latent of keys and values serves every head alike and has sizes of its own.

    Args:
        checked: `head_dim` is known to fit, or shall be tried.
    """
    config_class = reference_class(reference).config_class
    attributes: Mapping[str, str] = config_class.attribute_map
    raw = {name: value for name, value in raw.items() if attributes.get(name) not in raw}
    if "kv_lora_rank" in raw or ("kv_lora_rank" in config_defaults(reference)):
        raw["num_key_value_heads"] = raw["num_attention_heads"]
    if "sliding_window" not in {item.name for item in dataclasses.fields(config_class)}:
        raw.pop("sliding_window", None)  # handed to kernels, where the file has one
    if "head_dim" in raw and not checked and not _takes_head_dim(reference):
        del raw["head_dim"]
    return raw


def _rope(reference: str, variant: str, raw: Raw) -> Raw | None:
    """RoPE parameters of a variant: its family's own type in `base`, an active scaling in `base` or `mha`."""
    head_dim = turning_dim(reference, raw)
    nested = rope_layer_types(reference)
    if nested:
        kinds = {"base": "linear", "mha": "linear", "mqa": "default"}
        full = scaling(kinds[variant], head_dim)
        if variant == "mha":
            full["factor"] = 3.0
        return {
            name: {**(full if name == FULL else scaling("default", head_dim)), "rope_theta": THETA[name]}
            for name in nested
        }
    own = (config_defaults(reference).get("rope_parameters") or {}).get("rope_type", "default")
    if variant == "mha":
        values = scaling("yarn", head_dim)
        if not builds(reference, {**raw, "rope_parameters": {**values, "rope_theta": THETA[None]}}):
            values = scaling("longrope", head_dim)  # all that Phi-3's validator knows
            del values["factor"]
            values["attention_factor"] = 1.25
        elif own == "yarn":
            values |= {"truncate": True, "attention_factor": 1.25}
    else:
        values = scaling(own if variant == "base" else "default", head_dim)
    return {**values, "rope_theta": THETA[None]}


def pad_inside(raw: Raw, defaults: Raw) -> None:
    """Names a pad token in `raw` where the class's default is one of the real vocabulary: no embedding has its row."""
    pad = defaults.get("pad_token_id")
    if isinstance(pad, int) and pad >= raw["vocab_size"]:
        raw.setdefault("pad_token_id", raw["vocab_size"] // 2)  # below every vocabulary that is tried


def tiny_config(reference: str, variant: str) -> Raw:
    """config.json content of one variant: only what it sets, so that every default is the reader's own."""
    readable = readable_fields(reference)
    values = dict(VARIANTS[variant]) if variant in FROM_DEFAULTS else {**BASE, **VARIANTS[variant]}
    defaults = config_defaults(reference)
    unused = {name for name in ONLY_WHERE_SET if defaults.get(name) is None}
    chosen = {name: value for name, value in values.items() if readable(name) and name not in unused}
    raw = fitted(reference, chosen)
    raw.setdefault("num_hidden_layers", layer_count(reference))
    raw["model_type"] = reference_class(reference).config_class.model_type
    if variant not in FROM_DEFAULTS:
        raw["rope_parameters"] = _rope(reference, variant, raw)
    pad_inside(raw, defaults)
    if variant == "mha":
        raw["tie_word_embeddings"] = not defaults["tie_word_embeddings"]
    for name in ("layer_types", "mlp_only_layers"):
        if name in raw and name == "layer_types" and len(raw[name]) != raw["num_hidden_layers"]:
            raise ValueError(f"{variant}: {name} does not fit {raw['num_hidden_layers']} layers")
    return raw


def completed(reference: str, raw: Raw) -> Raw:
    """A config from a file with the fields that levels read by name, where the file leaves them to defaults."""
    listed = hf_config(reference, raw).to_dict()
    wanted = ("vocab_size", "num_hidden_layers", "rope_parameters", "hidden_size", "num_attention_heads")
    filled: Raw = {**{name: listed[name] for name in wanted}, **raw}
    return filled


def tiny_configs(reference: str, variants: Sequence[str] = tuple(VARIANTS)) -> dict[str, Raw]:
    """Every variant by name."""
    return {variant: tiny_config(reference, variant) for variant in variants}
