"""OLMo 2 between the Hub and bestiary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    Norm,
    NormCast,
    NormPlacement,
    QKNorm,
    QKNormSpan,
)
from bestiary.models.olmo2 import Olmo2

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{post_attention,post_feedforward}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.{q,k}_norm.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Olmo2Config, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 4096), hf.positive("num_attention_heads", 32)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads  # no field of the class, and read
    context, bias = hf.positive("max_position_embeddings", 2048), hf.take("attention_bias", bool, False)
    rope = hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context)
    return DecoderConfig(
        model_type="olmo2",
        vocab_size=hf.positive("vocab_size", 50304),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 11008),
        num_hidden_layers=hf.positive("num_hidden_layers", 32),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(span=QKNormSpan.FULL),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(
            eps=hf.positive_float("rms_norm_eps", 1e-5),
            placement=NormPlacement.POST,
            cast=NormCast.SCALE_THEN_CAST,
        ),
        rope=replace(rope, turn_in_fp32=True),
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(1),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Olmo2Config that describe `config`."""
    return usual_fields(config) | {
        "model_type": "olmo2",
        "rope_parameters": rope_to_hf(config.rope),
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B*", "C0*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*",
    "C17e*", "C51*", "C52*", "C53*", "C58*", "C59*", "H*", "K04*", "K05*", "K06*", "K07*", "N01*", "N02*", "N03*",
    "N04*", "O40*", "P1*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="olmo2",
    reference="transformers:Olmo2ForCausalLM",
    decoder=Olmo2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
