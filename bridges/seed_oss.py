"""Seed-OSS between the Hub and bestiary: Llama's tensors, two bias switches in attention, dropout on branches."""

from __future__ import annotations

from typing import Any

from bestiary.bridges import llama
from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields
from bestiary.models import SeedOss
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """SeedOssConfig, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 4096), hf.positive("num_attention_heads", 80)
    head_dim = hf.positive_optional("head_dim", int, 128) or hidden // heads
    context = hf.positive("max_position_embeddings", 524288)
    hf.inert("pretraining_tp", why="read by no forward pass")
    return DecoderConfig(
        model_type="seed_oss",
        vocab_size=hf.positive("vocab_size", 155136),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 27648),
        num_hidden_layers=hf.positive("num_hidden_layers", 64),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 8) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=hf.take("attention_bias", bool, True),
            out_bias=hf.take("attention_out_bias", bool, False),
            dropout=hf.take("attention_dropout", float, 0.1),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        activation=hf.activation("hidden_act", Activation.SILU),
        mlp_bias=hf.take("mlp_bias", bool, False),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        residual_dropout=hf.take("residual_dropout", float, 0.1),
        padding_idx=hf.padding_idx(1),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of SeedOssConfig that describe `config`."""
    return llama.config_to_hf(config) | {
        "model_type": "seed_oss",
        "attention_out_bias": config.attention.out_bias,
        "residual_dropout": config.residual_dropout,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44*", "B45b*", "B45d*", "C01*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*",
    "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*", "C17e*",
    "C2*", "C51*", "C52*", "C54*", "C58*", "C59*", "H*", "K04*", "K05*", "K06*", "K07*", "L01*", "L02*", "N01*",
    "N02*", "N03*", "O40*", "O5*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="seed_oss",
    reference="transformers:SeedOssForCausalLM",
    decoder=SeedOss,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=llama.RULES,
    kill_list=KILL_LIST,
)
