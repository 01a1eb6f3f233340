"""EXAONE 4.0 between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models.config import Activation, Attention, DecoderConfig, LayerType, Norm, NormPlacement, QKNorm
from bestiary.models.exaone4 import Exaone4

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{post_attention,post_feedforward}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.weight"),
    rename("model.layers.*.self_attn.{q,k}_norm.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Exaone4Config, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 32), hf.positive("hidden_size", 4096)
    heads, context = hf.positive("num_attention_heads", 32), hf.positive("max_position_embeddings", 2048)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads  # no field of the class, and read
    window, types = hf.positive_optional("sliding_window", int, 4096), _layer_types(hf, layers)
    return DecoderConfig(
        model_type="exaone4",
        vocab_size=hf.positive("vocab_size", 102400),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 16384),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 32),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qk_norm=QKNorm(),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5), placement=NormPlacement.POST),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=types,
        sliding_window=window,
        nope_layers=tuple(i for i, one in enumerate(types) if one is LayerType.FULL and window is not None),
        activation=hf.activation("hidden_act", Activation.SILU),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def _layer_types(hf: HFFields, layers: int) -> tuple[LayerType, ...]:
    """`layer_types`, or every `sliding_window_pattern`-th layer full; without either, transformers divides by zero."""
    why = "layer_types wins over it, and exports spell it out"
    if hf.json.get("layer_types") is not None:
        hf.inert("sliding_window_pattern", why=why)
        return hf.layer_types(layers, lambda _: LayerType.FULL)
    if hf.json.get("sliding_window", 4096) is None:
        raise hf.unsupported("sliding_window", "where no layer_types stand beside it.", remedy="add layer_types")
    period = hf.positive("sliding_window_pattern", 4)
    hf.inert("sliding_window_pattern", why=why)
    return hf.layer_types(layers, lambda i: LayerType.SLIDING if (i + 1) % period else LayerType.FULL)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Exaone4Config that describe `config`."""
    return usual_fields(config, without=("attention_bias",)) | {
        "model_type": "exaone4",
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45*", "C0*", "C10*", "C11b*", "C11c*",
    "C11d*", "C12*", "C13*", "C14*", "C16*", "C17*", "C51*", "C52*", "C58*", "C59*", "G22*", "G23*", "H*", "K01*",
    "K04*", "K05*", "K06*", "K07*", "L03*", "N01*", "N02*", "N03*", "O4*", "P1*", "Q*", "T46a*", "T46b*", "T46c*",
    "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="exaone4",
    reference="transformers:Exaone4ForCausalLM",
    decoder=Exaone4,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
