"""GLM-4 (0414) between the Hub and bestiary.

The hub calls the norms by where they stood in Llama: what follows attention there is the norm before the MLP here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import fused, rename, tie
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm, NormPlacement, RopeLayout
from bestiary.models.glm4 import Glm4

_LAYER = "model.layers.*"
NORMS = {
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""Ours to the hub's."""

RULES = (
    rename("model.embed_tokens.weight"),
    rename(f"{_LAYER}.input_layernorm.weight"),
    *(rename(f"{_LAYER}.{ours}.weight", f"{_LAYER}.{theirs}.weight") for ours, theirs in NORMS.items()),
    rename(f"{_LAYER}.self_attn.{{q,k,v,o}}_proj.weight"),
    rename(f"{_LAYER}.self_attn.{{q,k,v}}_proj.bias"),
    fused(f"{_LAYER}.mlp.{{gate,up}}_proj.weight", f"{_LAYER}.mlp.gate_up_proj.weight"),
    rename(f"{_LAYER}.mlp.down_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Glm4Config, the class's defaults written out."""
    heads, head_dim = hf.positive("num_attention_heads", 32), hf.positive("head_dim", 128)
    context = hf.positive("max_position_embeddings", 131072)
    rope = hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context, share=0.5)
    return DecoderConfig(
        model_type="glm4",
        vocab_size=hf.positive("vocab_size", 151552),
        hidden_size=hf.positive("hidden_size", 4096),
        intermediate_size=hf.positive("intermediate_size", 13696),
        num_hidden_layers=hf.positive("num_hidden_layers", 40),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 2),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=hf.take("attention_bias", bool, True),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1.5625e-7), placement=NormPlacement.SANDWICH),
        rope=replace(rope, layout=RopeLayout.INTERLEAVED),
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(151329),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Glm4Config that describe `config`."""
    return usual_fields(config) | {
        "model_type": "glm4",
        "rope_parameters": rope_to_hf(config.rope, config.attention.head_dim),
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B04*", "B1*", "B43*", "B44*", "B45b*", "B45d*", "C01*", "C02*", "C03*", "C04*", "C05b*", "C06*", "C07*",
    "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*",
    "C17e*", "C51*", "C52*", "C54*", "C58*", "C59*", "G28a*", "G28b*", "G28c*", "H*", "K04*", "K05*", "K06*",
    "K07*", "N01*", "N02*", "N03*", "O40*", "O5*", "P0*", "P4*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*",
    "T47e*", "T47f*", "X50b*", "X50c*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="glm4",
    reference="transformers:Glm4ForCausalLM",
    decoder=Glm4,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    module_map={f"{_LAYER}.{ours}": f"{_LAYER}.{theirs}" for ours, theirs in NORMS.items()},
    kill_list=KILL_LIST,
)
