"""OLMo 3 between the Hub and bestiary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bestiary.bridges import olmo2
from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields
from bestiary.bridges.rope import rope_to_hf
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
    QKNorm,
    QKNormSpan,
)
from bestiary.models.olmo3 import Olmo3


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Olmo3Config, the class's defaults written out."""
    hidden, heads = hf.positive("hidden_size", 4096), hf.positive("num_attention_heads", 32)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads  # no field of the class, and read
    layers, context = hf.positive("num_hidden_layers", 32), hf.positive("max_position_embeddings", 2048)
    bias = hf.take("attention_bias", bool, False)
    # The spelling before transformers 5 states the base of full layers; sliding ones keep the class's.
    full, sliding = hf.rope_by_layer_type(
        thetas=(500_000.0, 500_000.0), rotary_dim=head_dim, max_positions=context, sliding_theta=None
    )
    return DecoderConfig(
        model_type="olmo3",
        vocab_size=hf.positive("vocab_size", 50304),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 11008),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(span=QKNormSpan.FULL),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(
            eps=hf.positive_float("rms_norm_eps", 1e-5),
            placement=NormPlacement.POST,
            cast=NormCast.SCALE_THEN_CAST,
        ),
        rope=replace(full, turn_in_fp32=True),
        sliding_rope=replace(sliding, turn_in_fp32=True),
        layer_types=hf.layer_types(layers, lambda i: LayerType.SLIDING if (i + 1) % 4 else LayerType.FULL),
        sliding_window=hf.positive_optional("sliding_window", int, 4096),
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(1),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Olmo3Config that describe `config`."""
    ropes = {"full_attention": config.rope, "sliding_attention": config.sliding_rope or config.rope}
    stated = {name: rope_to_hf(rope) for name, rope in ropes.items()}
    for one in stated.values():
        one.pop("truncate", None)  # transformers does not look for it here
    return olmo2.config_to_hf(config) | {
        "model_type": "olmo3",
        "rope_parameters": stated,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
    }


# fmt: off
KILL_LIST = (
    "B*", "C0*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17*", "C51*", "C52*", "C53*",
    "C58*", "C59*", "G22*", "G23*", "G25*", "H*", "K01*", "K04*", "K05*", "K06*", "K07*", "N01*", "N02*", "N03*",
    "N04*", "O41*", "P1*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="olmo3",
    reference="transformers:Olmo3ForCausalLM",
    decoder=Olmo3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=olmo2.RULES,
    kill_list=KILL_LIST,
)
