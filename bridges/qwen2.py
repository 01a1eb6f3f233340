"""Qwen2 and Qwen2.5 between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import ignore, rename, tie
from bestiary.models import Qwen2
from bestiary.models.config import Activation, Attention, DecoderConfig, LayerType, Norm

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.o_proj.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
    ignore("model.layers.*.self_attn.rotary_emb.inv_freq", reason="recomputed from the config"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Qwen2Config, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 32), hf.positive("hidden_size", 4096)
    heads, context = hf.positive("num_attention_heads", 32), hf.positive("max_position_embeddings", 32768)
    head_dim = hf.positive("head_dim", hidden // heads)  # no field of the class, yet its attention reads it
    window = hf.switched_window(4096)
    first_sliding = hf.take("max_window_layers", int, 28)
    hf.inert("max_window_layers", why="layer_types wins over it, and exports spell it out")
    hf.inert("use_mrope", allowed=(False, None), why="positions have one axis in this family")
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=hf.positive("vocab_size", 151936),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 22016),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 32) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=hf.layer_types(
            layers, lambda i: LayerType.FULL if window is None or i < first_sliding else LayerType.SLIDING
        ),
        sliding_window=window,
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Qwen2Config that describe `config`."""
    return usual_fields(config, without=("attention_bias",)) | {
        "model_type": "qwen2",
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45b*", "B45d*", "C01*", "C02*",
    "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*",
    "C14*", "C16*", "C17*", "C2*", "C51*", "C52*", "C54*", "C58*", "C59*", "G22*", "G23*", "H*", "K01*", "K04*",
    "K05*", "K06*", "K07*", "N01*", "N02*", "N03*", "O4*", "O5*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*",
    "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="qwen2",
    reference="transformers:Qwen2ForCausalLM",
    decoder=Qwen2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
