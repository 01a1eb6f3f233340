"""Gemma between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models import Gemma
from bestiary.models.config import Activation, Attention, DecoderConfig, Norm, NormCast

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """GemmaConfig, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 3072), hf.positive("num_attention_heads", 16)
    head_dim, context = hf.positive("head_dim", 256), hf.positive("max_position_embeddings", 8192)
    bias = hf.take("attention_bias", bool, False)
    hf.inert(
        "use_bidirectional_attention",
        allowed=(None, False),
        why="transformers' masks stay causal, and what attention makes of it depends on the kernel",
    )
    hf.inert("hidden_activation", why="transformers reads hidden_act")
    return DecoderConfig(
        model_type="gemma",
        vocab_size=hf.positive("vocab_size", 256000),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 24576),
        num_hidden_layers=hf.positive("num_hidden_layers", 28),
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 16),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6), cast=NormCast.SCALE_THEN_CAST, plus_one=True),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        activation=_activation(hf),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, True),
        padding_idx=hf.padding_idx(0),
        embedding_multiplier=hidden**0.5,
        embedding_multiplier_in_weight_dtype=True,
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def _activation(hf: HFFields) -> Activation:
    """`hidden_act`, of which "gelu" means the tanh form: the first files said so, and transformers reads them so."""
    found = hf.activation("hidden_act", Activation.GELU_TANH)
    return Activation.GELU_TANH if hf.json.get("hidden_act") == "gelu" else found


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of GemmaConfig that describe `config`."""
    exact = config.activation is Activation.GELU
    return usual_fields(config) | {
        "model_type": "gemma",
        "rope_parameters": rope_to_hf(config.rope),
        "hidden_act": "gelu_python" if exact else config.activation,
    }


# fmt: off
KILL_LIST = (
    "B*", "C01*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11a*", "C11c*",
    "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*", "C17e*", "C2*", "C5*", "G26*", "G28d*",
    "G28e*", "H*", "K04*", "K05*", "K06*", "K07*", "N*", "O40*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*",
    "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="gemma",
    reference="transformers:GemmaForCausalLM",
    decoder=Gemma,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
