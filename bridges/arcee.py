"""Arcee (AFM) between the Hub and bestiary: Llama without a gate in the MLP."""

from __future__ import annotations

from typing import Any

from bestiary.bridges import llama
from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields
from bestiary.bridges.rules import rename, tie
from bestiary.models import Arcee
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.mlp.{up,down}_proj.{weight,bias}"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """ArceeConfig, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 2560), hf.positive("num_attention_heads", 32)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads
    context = hf.positive("max_position_embeddings", 4096)
    bias = hf.take("attention_bias", bool, False)
    return DecoderConfig(
        model_type="arcee",
        vocab_size=hf.positive("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 18432),
        num_hidden_layers=hf.positive("num_hidden_layers", 32),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        activation=hf.activation("hidden_act", Activation.RELU2),
        mlp_bias=hf.take("mlp_bias", bool, False),
        mlp_gated=False,
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of ArceeConfig that describe `config`."""
    return llama.config_to_hf(config) | {
        "model_type": "arcee",
    }


# fmt: off
KILL_LIST = (
    "B04*", "B1*", "B4*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11c*", "C11d*",
    "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*", "C17e*", "C2*", "C5*", "H*", "K04*", "K06*",
    "K07*", "N01*", "N02*", "N03*", "O40*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="arcee",
    reference="transformers:ArceeForCausalLM",
    decoder=Arcee,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
