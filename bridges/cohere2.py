"""Cohere 2 (Command R7B, Command A) between the Hub and bestiary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models.cohere2 import Cohere2
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
    RopeLayout,
)

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.input_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)
_OTHER_CODE = "read by other code than transformers', which does what it says here"
# Fields that published files state and Cohere2Config does not have, at the values that describe its block.
_STATED: dict[str, tuple[Any, ...]] = {
    "order_of_interleaved_layers": ("local_attn_first", None),
    "position_embedding_type": ("rope_gptj", None),
    "rotary_pct": (1.0, None),
    "use_gated_activation": (True, None),
    "use_parallel_block": (True, None),
}


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Cohere2Config, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 40), hf.positive("hidden_size", 8192)
    heads, context = hf.positive("num_attention_heads", 64), hf.positive("max_position_embeddings", 8192)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads
    bias, pattern = hf.take("attention_bias", bool, False), hf.positive("sliding_window_pattern", 4)
    hf.inert("sliding_window_pattern", why="layer_types wins over it, and exports spell it out")
    for name, allowed in _STATED.items():
        hf.inert(name, allowed=allowed, why=_OTHER_CODE)
    for name in ("use_embedding_sharing", "use_parallel_embedding"):
        hf.inert(name, why=_OTHER_CODE)
    types = hf.layer_types(layers, lambda i: LayerType.SLIDING if (i + 1) % pattern else LayerType.FULL)
    rope = hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context)
    return DecoderConfig(
        model_type="cohere2",
        vocab_size=hf.positive("vocab_size", 256000),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 22528),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(
            eps=hf.positive_float("layer_norm_eps", 1e-5),
            placement=NormPlacement.PARALLEL,
            cast=NormCast.SCALE_THEN_CAST,
            subtract_mean=True,
        ),
        rope=replace(rope, layout=RopeLayout.INTERLEAVED, turn_in_fp32=True, round_tables=True),
        layer_types=types,
        sliding_window=hf.positive_optional("sliding_window", int, 4096),
        nope_layers=tuple(i for i, one in enumerate(types) if one is LayerType.FULL),
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, True),
        logits_divisor=1.0 / hf.positive_float("logit_scale", 0.0625),
        padding_idx=hf.padding_idx(0),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Cohere2Config that describe `config`."""
    return usual_fields(config, without=("rms_norm_eps",)) | {
        "model_type": "cohere2",
        "layer_norm_eps": config.norm.eps,
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
        "logit_scale": 1.0 / config.logits_divisor,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44a*", "B44b*", "B44c*", "B44e*", "B44f*", "B44g*", "B45*", "C01*", "C02*", "C04*",
    "C05b*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*",
    "C17*", "C51*", "C53*", "C54*", "C59*", "G22*", "G23*", "H*", "K01*", "K05*", "K06*", "K07*", "L03*", "L04b*",
    "N01*", "N02*", "N03*", "N04*", "O4*", "P0*", "P54*", "P58*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*",
    "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="cohere2",
    reference="transformers:Cohere2ForCausalLM",
    decoder=Cohere2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
