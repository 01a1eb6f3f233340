"""Granite between the Hub and bestiary: Llama with four multipliers."""

from __future__ import annotations

from typing import Any

from bestiary.bridges import llama
from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields
from bestiary.models import Granite
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """GraniteConfig, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 4096), hf.positive("num_attention_heads", 32)
    head_dim = hf.positive("head_dim", hidden // heads)  # no field of the class, yet its attention reads it
    context = hf.positive("max_position_embeddings", 2048)
    bias = hf.take("attention_bias", bool, False)
    return DecoderConfig(
        model_type="granite",
        vocab_size=hf.positive("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 11008),
        num_hidden_layers=hf.positive("num_hidden_layers", 32),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=hf.positive_float("attention_multiplier", 1.0),
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        activation=hf.activation("hidden_act", Activation.SILU),
        mlp_bias=hf.take("mlp_bias", bool, False),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        embedding_multiplier=hf.positive_float("embedding_multiplier", 1.0),
        scales_inputs_embeds=True,
        residual_multiplier=hf.positive_float("residual_multiplier", 1.0),
        logits_divisor=hf.positive_float("logits_scaling", 1.0),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of GraniteConfig that describe `config`."""
    return llama.config_to_hf(config) | {
        "model_type": "granite",
        "attention_multiplier": config.attention.scale,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }


# fmt: off
KILL_LIST = (
    "B*", "C01*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*",
    "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*", "C17e*", "C2*", "C51*", "C53*", "C54*", "C58*", "C59*",
    "G24*", "G26*", "H*", "K04*", "K05*", "K06*", "K07*", "L04*", "N01*", "N02*", "N03*", "O40*", "T46a*", "T46b*",
    "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="granite",
    reference="transformers:GraniteForCausalLM",
    decoder=Granite,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=llama.RULES,
    kill_list=KILL_LIST,
)
