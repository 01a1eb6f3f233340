"""SmolLM3 between the Hub and bestiary: Llama's tensors, RoPE on some layers only."""

from __future__ import annotations

from typing import Any

from bestiary.bridges import llama
from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields
from bestiary.models import SmolLM3
from bestiary.models.config import Activation, Attention, DecoderConfig, LayerType, Norm


def _nope_layers(hf: HFFields, layers: int) -> tuple[int, ...]:
    """`no_rope_layers` holds a 0 where a layer has no RoPE; absent, that is every n-th layer."""
    interval = hf.positive("no_rope_layer_interval", 4)
    switches = hf.take_optional("no_rope_layers", list)
    if switches is None:
        switches = [int((i + 1) % interval != 0) for i in range(layers)]
    if len(switches) < layers or any(value not in (0, 1) for value in switches):
        raise hf.unsupported("no_rope_layers", f"has no 0 or 1 for each of {layers} layers.", remedy="correct the list")
    return tuple(i for i in range(layers) if not switches[i])


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """SmolLM3Config, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 36), hf.positive("hidden_size", 2048)
    heads, context = hf.positive("num_attention_heads", 16), hf.positive("max_position_embeddings", 32768)
    head_dim = hf.positive("head_dim", hidden // heads)  # no field of the class, yet its attention reads it
    bias, nope = hf.take("attention_bias", bool, False), _nope_layers(hf, layers)
    window, slides = hf.positive_optional("sliding_window", int), hf.take("use_sliding_window", bool, False)
    slides = slides and window is not None
    for name in ("max_window_layers", "pretraining_tp"):
        hf.inert(name, why="in the published file, and read by nobody")
    return DecoderConfig(
        model_type="smollm3",
        vocab_size=hf.positive("vocab_size", 128256),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 11008),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 4) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=hf.rope(theta=2_000_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=hf.layer_types(layers, lambda i: LayerType.SLIDING if slides and i in nope else LayerType.FULL),
        sliding_window=window,  # layer_types alone decides where it holds
        nope_layers=nope,
        activation=hf.activation("hidden_act", Activation.SILU),
        mlp_bias=hf.take("mlp_bias", bool, False),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, True),
        padding_idx=hf.padding_idx(128004),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of SmolLM3Config that describe `config`."""
    return llama.config_to_hf(config) | {
        "model_type": "smollm3",
        "layer_types": list(config.layer_types),
        "use_sliding_window": LayerType.SLIDING in config.layer_types,
        "sliding_window": config.sliding_window,
        "no_rope_layers": [int(i not in config.nope_layers) for i in range(config.num_hidden_layers)],
    }


# fmt: off
KILL_LIST = (
    "B*", "C01*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*",
    "C12*", "C13*", "C14*", "C16*", "C17*", "C2*", "C5*", "G22*", "G23*", "H*", "K01*", "K04*", "K05*", "K06*",
    "K07*", "L03*", "N01*", "N02*", "N03*", "O4*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*",
    "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="smollm3",
    reference="transformers:SmolLM3ForCausalLM",
    decoder=SmolLM3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=llama.RULES,
    kill_list=KILL_LIST,
)
