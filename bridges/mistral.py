"""Mistral between the Hub and bestiary: Llama's tensors, and one window for all layers or for none."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.llama import RULES
from bestiary.bridges.rope import rope_to_hf
from bestiary.models import Mistral
from bestiary.models.config import Activation, Attention, DecoderConfig, LayerType, Norm


def windowed(hf: HFFields, model_type: str) -> DecoderConfig:
    """What MistralConfig shares with MinistralConfig, defaults written out: the window stands on every layer."""
    layers, hidden = hf.positive("num_hidden_layers", 32), hf.positive("hidden_size", 4096)
    heads, context = hf.positive("num_attention_heads", 32), hf.positive("max_position_embeddings", 131072)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads
    window = hf.positive_optional("sliding_window", int, 4096)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=hf.positive("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 14336),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 8) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=(LayerType.FULL if window is None else LayerType.SLIDING,) * layers,
        sliding_window=window,
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """MistralConfig, the class's defaults written out."""
    hf.inert("layer_types", allowed=(None,), why="the window holds for all layers or for none")
    return windowed(hf, "mistral")


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of MistralConfig that describe `config`."""
    return usual_fields(config, without=("attention_bias",)) | {
        "model_type": "mistral",
        "rope_parameters": rope_to_hf(config.rope),
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45*", "C01*", "C02*", "C03*",
    "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*",
    "C16*", "C17*", "C2*", "C51*", "C52*", "C54*", "C58*", "C59*", "G22a*", "G22b*", "G22c*", "H*", "K01*", "K04*",
    "K05*", "K06*", "K07*", "N01*", "N02*", "N03*", "O40*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*",
    "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="mistral",
    reference="transformers:MistralForCausalLM",
    decoder=Mistral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
