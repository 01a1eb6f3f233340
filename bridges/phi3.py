"""Phi-3 and Phi-4 between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import fused, rename, tie
from bestiary.models import Phi3
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    LongRopeScaling,
    Norm,
    Rope,
)

_LAYER, _CONTEXT = "model.layers.*", "original_max_position_embeddings"
RULES = (
    rename("model.embed_tokens.weight"),
    rename(f"{_LAYER}.{{input,post_attention}}_layernorm.weight"),
    fused(f"{_LAYER}.self_attn.{{q,k,v}}_proj.weight", f"{_LAYER}.self_attn.qkv_proj.weight"),
    rename(f"{_LAYER}.self_attn.o_proj.weight"),
    fused(f"{_LAYER}.mlp.{{gate,up}}_proj.weight", f"{_LAYER}.mlp.gate_up_proj.weight"),
    rename(f"{_LAYER}.mlp.down_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)
_FROM_THE_HUB = "read by the modelling code that lies beside old checkpoints, not by transformers"


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Phi3Config, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 3072), hf.positive("num_attention_heads", 32)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads  # no field of the class, and read
    layers, context = hf.positive("num_hidden_layers", 32), hf.positive("max_position_embeddings", 4096)
    window = hf.positive_optional("sliding_window", int)
    hf.inert("embd_pdrop", why="Phi3Model never applies it")
    hf.inert("auto_map", why=_FROM_THE_HUB)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        hf.inert(name, allowed=(False, None), why=_FROM_THE_HUB)
    return DecoderConfig(
        model_type="phi3",
        vocab_size=hf.positive("vocab_size", 32064),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 8192),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=_rope(hf, head_dim, context),
        layer_types=(LayerType.FULL if window is None else LayerType.SLIDING,) * layers,
        sliding_window=window,
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        residual_dropout=hf.take("resid_pdrop", float, 0.0),
        padding_idx=hf.padding_idx(32000),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def _rope(hf: HFFields, head_dim: int, context: int) -> Rope:
    """Default or LongRoPE, which old files call "su" or "yarn"; the original context stands beside it and wins."""
    original = hf.positive(_CONTEXT, 4096)
    for name in ("rope_parameters", "rope_scaling"):
        stated = hf.json.get(name)
        if isinstance(stated, dict):
            old = {key: "longrope" for key in ("rope_type", "type") if stated.get(key) in ("su", "yarn")}
            hf.json[name] = {**stated, **old}
            if "longrope" in (hf.json[name].get("rope_type"), hf.json[name].get("type")):
                hf.json[name][_CONTEXT] = original
    rope = hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context, share=1.0)
    if rope.scaling is None:
        hf.inert(_CONTEXT, why="LongRoPE alone reads it")
    elif not isinstance(rope.scaling, LongRopeScaling):
        raise hf.unsupported("rope_parameters", "is neither default nor LongRoPE.", remedy="correct rope_type")
    return rope


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Phi3Config that describe `config`."""
    heads, scaling = config.attention, config.rope.scaling
    fields = usual_fields(config, without=("attention_bias", "head_dim"))
    if heads.num_heads * heads.head_dim != config.hidden_size:
        fields["head_dim"] = heads.head_dim
    if isinstance(scaling, LongRopeScaling):
        fields[_CONTEXT] = scaling.original_max_position_embeddings
    return fields | {
        "model_type": "phi3",
        "rope_parameters": rope_to_hf(config.rope, heads.head_dim),
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
        "resid_pdrop": config.residual_dropout,
    }


# fmt: off
KILL_LIST = (
    "B1*", "B43*", "B44b*", "B44c*", "B44e*", "B44f*", "B44g*", "B45b*", "B45d*", "C01*", "C02*", "C04*", "C05*",
    "C06*", "C07e*", "C07f*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*",
    "C17*", "C2*", "C51*", "C54*", "C58*", "C59*", "G22a*", "G22b*", "G22c*", "H*", "K01*", "K04*", "K05*", "K06*",
    "K07*", "N01*", "N02*", "N03*", "P4*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="phi3",
    reference="transformers:Phi3ForCausalLM",
    decoder=Phi3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
