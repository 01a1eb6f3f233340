"""Gemma 2 between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models import Gemma2
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
)

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Gemma2Config, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 26), hf.positive("hidden_size", 2304)
    heads, head_dim = hf.positive("num_attention_heads", 8), hf.positive("head_dim", 256)
    context, bias = hf.positive("max_position_embeddings", 8192), hf.take("attention_bias", bool, False)
    hf.inert(
        "use_bidirectional_attention",
        allowed=(None, False),
        why="transformers' masks stay causal, and what attention makes of it depends on the kernel",
    )
    return DecoderConfig(
        model_type="gemma2",
        vocab_size=hf.positive("vocab_size", 256000),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 9216),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 4),
            head_dim=head_dim,
            scale=hf.positive("query_pre_attn_scalar", 256) ** -0.5,
            qkv_bias=bias,
            out_bias=bias,
            logit_softcap=hf.positive_optional("attn_logit_softcapping", float, 50.0),
            dropout=hf.take_optional("attention_dropout", float, 0.0) or 0.0,
        ),
        norm=Norm(
            eps=hf.positive_float("rms_norm_eps", 1e-6),
            placement=NormPlacement.SANDWICH,
            cast=NormCast.SCALE_THEN_CAST,
            plus_one=True,
        ),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=hf.layer_types(layers, lambda i: LayerType.FULL if i % 2 else LayerType.SLIDING),
        sliding_window=hf.positive_optional("sliding_window", int, 4096),
        activation=hf.activation("hidden_activation", Activation.GELU_TANH),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, True),
        padding_idx=hf.padding_idx(0),
        embedding_multiplier=hidden**0.5,
        embedding_multiplier_in_weight_dtype=True,
        final_logit_softcap=hf.positive_optional("final_logit_softcapping", float, 30.0),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Gemma2Config that describe `config`."""
    return usual_fields(config) | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": round(config.attention.scale**-2),
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "hidden_activation": config.activation,
        "attn_logit_softcapping": config.attention.logit_softcap,
        "final_logit_softcapping": config.final_logit_softcap,
    }


# fmt: off
KILL_LIST = (
    "B*", "C01*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11a*", "C11c*",
    "C11d*", "C12*", "C13*", "C14*", "C16*", "C17*", "C51*", "C53*", "C54*", "C58*", "C59*", "G22*", "G23*", "G24*",
    "G26*", "G28*", "G29*", "H*", "K02*", "K04*", "K05*", "K06*", "K07a*", "N*", "O4*", "P29*", "T46a*", "T46b*",
    "T46c*", "T46g*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="gemma2",
    reference="transformers:Gemma2ForCausalLM",
    decoder=Gemma2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
