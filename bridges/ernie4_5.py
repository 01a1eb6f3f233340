"""ERNIE 4.5 (dense) between the Hub and bestiary: Llama's tensors, RoPE on neighbouring coordinates in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.llama import RULES
from bestiary.bridges.rope import rope_to_hf
from bestiary.models import Ernie45
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm, RopeLayout


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Ernie4_5Config, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 1024), hf.positive("num_attention_heads", 16)
    head_dim = hf.positive_optional("head_dim", int, 128) or hidden // heads
    context = hf.positive("max_position_embeddings", 131072)
    bias = bool(hf.take_optional("use_bias", bool, False))
    rope = hf.rope(theta=500_000.0, rotary_dim=head_dim, max_positions=context)
    hf.inert("auto_map", why="transformers has the class itself; code of a checkpoint is never run")
    return DecoderConfig(
        model_type="ernie4_5",
        vocab_size=hf.positive("vocab_size", 103424),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 3072),
        num_hidden_layers=hf.positive("num_hidden_layers", 18),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 2) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=replace(rope, layout=RopeLayout.INTERLEAVED, turn_in_fp32=True),
        activation=hf.activation("hidden_act", Activation.SILU),
        mlp_bias=bias,
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, True),
        padding_idx=hf.padding_idx(0),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Ernie4_5Config that describe `config`."""
    return usual_fields(config, without=("attention_bias", "attention_dropout")) | {
        "model_type": "ernie4_5",
        "rope_parameters": rope_to_hf(config.rope),
        "use_bias": config.attention.qkv_bias,
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45*", "C01*", "C02*", "C03*",
    "C04*", "C05b*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*",
    "C16*", "C17a*", "C17b*", "C17d*", "C17e*", "C2*", "C51*", "C52*", "C54*", "C58*", "H*", "K04*", "K05*", "K06*",
    "K07*", "L05*", "N01*", "N02*", "N03*", "O40*", "P0*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*",
    "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="ernie4_5",
    reference="transformers:Ernie4_5ForCausalLM",
    decoder=Ernie45,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
