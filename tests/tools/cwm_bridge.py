"""CWM between the Hub and bestiary: what completes the skeleton that `bestiary port new cwm` writes."""

from __future__ import annotations

from typing import Any

from bestiary_cwm.model import Cwm

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_from_hf, rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models.config import Activation, Attention, DecoderConfig, LayerType, Norm, Rope

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.{weight,bias}"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)

# What CwmConfig fills in where a config says nothing about RoPE.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """CwmConfig, the class's defaults written out."""
    hidden, layers = hf.positive("hidden_size", 6144), hf.positive("num_hidden_layers", 64)
    heads, context = hf.positive("num_attention_heads", 48), hf.positive("max_position_embeddings", 131072)
    if hidden % heads:
        raise hf.unsupported("hidden_size", "is no multiple of num_attention_heads.", remedy="correct the config")
    head_dim = hf.positive("head_dim", 128)
    hf.inert("pretraining_tp", why="how the original training was sharded")
    return DecoderConfig(
        model_type="cwm",
        vocab_size=hf.positive("vocab_size", 128256),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 21504),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 8),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=_rope(hf, head_dim, context),
        layer_types=hf.layer_types(layers, lambda i: LayerType.SLIDING if i % 4 else LayerType.FULL),
        sliding_window=hf.positive("sliding_window", 8192),
        activation=hf.activation("hidden_act", Activation.SILU),
        mlp_bias=hf.take("mlp_bias", bool, False),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def _rope(hf: HFFields, head_dim: int, context: int) -> Rope:
    theta = 1_000_000.0
    if hf.take_optional("rope_parameters", dict) or hf.take_optional("rope_scaling", dict):
        return hf.rope(theta=theta, rotary_dim=head_dim, max_positions=context)
    hf.foreign("rope_theta", why="the class's own parameters, theta among them, win where a config states none")
    hf.inert("partial_rotary_factor", allowed=(1.0, None), why="the whole head turns in this family")
    own = hf.nested("rope_parameters", _LLAMA3)
    return rope_from_hf(own, theta=theta, rotary_dim=head_dim, max_positions=context)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of CwmConfig that describe `config`."""
    fields = usual_fields(config) | {
        "model_type": "cwm",
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.activation,
    }
    del fields["attention_bias"]  # the class has none
    return fields


KILL_LIST: tuple[str, ...] = ()

BRIDGE = Bridge(
    model_type="cwm",
    reference="transformers:CwmForCausalLM",
    decoder=Cwm,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
