"""Gemma 3 (text) between the Hub and bestiary: alone, and inside the multimodal checkpoints under either prefix."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.plan import PLAIN, Naming
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import ignore, rename, tie
from bestiary.models import Gemma3
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
    QKNorm,
)

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.{q,k}_norm.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)

_VISION = "the vision side of a multimodal checkpoint"
NAMINGS = (
    PLAIN,
    Naming(
        "multimodal, as the hub stores it",
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        (ignore("vision_tower.**", reason=_VISION), ignore("multi_modal_projector.**", reason=_VISION)),
    ),
    Naming(
        "multimodal, as transformers 5 names its modules",
        {"model.": "model.language_model.", "lm_head.": "lm_head."},
        (ignore("model.vision_tower.**", reason=_VISION), ignore("model.multi_modal_projector.**", reason=_VISION)),
        inside="text_config",
    ),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Gemma3TextConfig, the class's defaults written out; of a Gemma3Config its text part."""
    if "text_config" in hf:
        return _text_config(_text_part(hf))
    if hf.json.get("model_type") == "gemma3":
        raise hf.unsupported(
            "text_config",
            'under model_type = "gemma3", whose sizes transformers reads there and nowhere else.',
            remedy='set model_type to "gemma3_text" if the file describes the text model alone',
        )
    return _text_config(hf)


def _text_part(hf: HFFields) -> HFFields:
    """The text fields of a multimodal config; the outer flag is the one by which transformers ties."""
    hf.foreign("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", why=_VISION)
    hf.foreign("image_token_index", "initializer_range", why=_VISION)
    text = hf.nested("text_config", part=True)
    text.dtype()  # the outer one holds
    tied = hf.take("tie_word_embeddings", bool, True)
    if text.take("tie_word_embeddings", bool, tied) != tied:
        raise text.unsupported("tie_word_embeddings", f"contradicts the outer flag, {tied}.", remedy="make them equal")
    text.json["tie_word_embeddings"] = tied
    return text


def _text_config(hf: HFFields) -> DecoderConfig:
    layers, hidden = hf.positive("num_hidden_layers", 26), hf.positive("hidden_size", 2304)
    heads, head_dim = hf.positive("num_attention_heads", 8), hf.positive("head_dim", 256)
    context, pattern = hf.positive("max_position_embeddings", 131072), hf.positive("sliding_window_pattern", 6)
    bias = hf.take("attention_bias", bool, False)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        hf.inert(name, why="layer_types wins over it, and exports spell it out")
    hf.inert("attn_logit_softcapping", allowed=(None,), why="Gemma3Attention never applies it")
    both_ways = hf.take_optional("use_bidirectional_attention", bool, False) or False
    full, sliding = hf.rope_by_layer_type(thetas=(1e6, 1e4), rotary_dim=head_dim, max_positions=context)
    return DecoderConfig(
        model_type="gemma3_text",
        vocab_size=hf.positive("vocab_size", 262208),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 9216),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 4),
            head_dim=head_dim,
            scale=hf.positive("query_pre_attn_scalar", 256) ** -0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(),
            dropout=hf.take_optional("attention_dropout", float, 0.0) or 0.0,
            causal=not both_ways,
        ),
        norm=Norm(
            eps=hf.positive_float("rms_norm_eps", 1e-6),
            placement=NormPlacement.SANDWICH,
            cast=NormCast.SCALE_THEN_CAST,
            plus_one=True,
        ),
        rope=full,
        sliding_rope=sliding,
        layer_types=hf.layer_types(layers, lambda i: LayerType.SLIDING if (i + 1) % pattern else LayerType.FULL),
        sliding_window=_window(hf, both_ways),
        activation=hf.activation("hidden_activation", Activation.GELU_TANH),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, True),
        padding_idx=hf.padding_idx(0),
        embedding_multiplier=hidden**0.5,
        embedding_multiplier_in_weight_dtype=True,
        final_logit_softcap=hf.positive_optional("final_logit_softcapping", float),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def _window(hf: HFFields, both_ways: bool) -> int | None:
    """Tokens a query sees to one side, itself included; a file counts those of both sides where it looks both ways."""
    window = hf.positive_optional("sliding_window", int, 4096)
    if not both_ways:
        return window
    if window is None:
        raise hf.unsupported("sliding_window", "where transformers halves it.", remedy="give the window in tokens")
    return window // 2 + 1


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Gemma3TextConfig that describe `config`."""
    sliding = config.rope if config.sliding_rope is None else config.sliding_rope
    window, causal = config.sliding_window, config.attention.causal
    return usual_fields(config) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": round(config.attention.scale**-2),
        "rope_parameters": {"full_attention": rope_to_hf(config.rope), "sliding_attention": rope_to_hf(sliding)},
        "layer_types": list(config.layer_types),
        "sliding_window": window if causal or window is None else max(1, 2 * (window - 1)),
        "use_bidirectional_attention": not causal,
        "hidden_activation": config.activation,
        "final_logit_softcapping": config.final_logit_softcap,
    }


# fmt: off
KILL_LIST = (
    "B*", "C0*", "C10*", "C11a*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17*", "C51*", "C53*", "C54*",
    "C58*", "C59*", "G*", "H*", "K01*", "K02*", "K04*", "K05*", "K06*", "K07*", "N0*", "O41*", "Q*", "T46a*", "T46b*",
    "T46c*", "T46g*", "T47a*", "T47b*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="gemma3_text",
    reference="transformers:Gemma3ForCausalLM",
    decoder=Gemma3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    namings=NAMINGS,
    kill_list=KILL_LIST,
)
