"""HunYuan (dense, v1) between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models import HunYuanDenseV1
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm, QKNorm

_ATTENTION = "model.layers.*.self_attn"

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename(f"{_ATTENTION}.{{q,k,v,o}}_proj.{{weight,bias}}"),
    rename(f"{_ATTENTION}.q_norm.weight", f"{_ATTENTION}.query_layernorm.weight"),
    rename(f"{_ATTENTION}.k_norm.weight", f"{_ATTENTION}.key_layernorm.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """HunYuanDenseV1Config, the class's defaults written out; nothing stands in for a missing head_dim."""
    heads, head_dim = hf.positive("num_attention_heads", 32), hf.positive("head_dim")
    context = hf.positive("max_position_embeddings", 2048)
    bias = hf.take("attention_bias", bool, False)
    hf.inert("use_qk_norm", allowed=(True,), why="always normalised in this family")
    hf.inert("use_cla", allowed=(False, None), why="each layer has its own keys and values")
    for name in ("eod_token_id", "pretraining_tp"):
        hf.inert(name, why="read by no forward pass")
    return DecoderConfig(
        model_type="hunyuan_v1_dense",
        vocab_size=hf.positive("vocab_size", 290943),
        hidden_size=hf.positive("hidden_size", 4096),
        intermediate_size=hf.positive("intermediate_size", 11008),
        num_hidden_layers=hf.positive("num_hidden_layers", 32),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(after_rope=True),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context, alpha=True),
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(0),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of HunYuanDenseV1Config that describe `config`."""
    return usual_fields(config) | {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": rope_to_hf(config.rope),
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B*", "C0*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*",
    "C17e*", "C2*", "C5*", "H*", "K04*", "K05*", "K06*", "K07*", "L06*", "L07*", "N01*", "N02*", "N03*", "O40*",
    "Q2*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="hunyuan_v1_dense",
    reference="transformers:HunYuanDenseV1ForCausalLM",
    decoder=HunYuanDenseV1,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    module_map={
        f"{_ATTENTION}.q_norm": f"{_ATTENTION}.query_layernorm",
        f"{_ATTENTION}.k_norm": f"{_ATTENTION}.key_layernorm",
    },
    kill_list=KILL_LIST,
)
