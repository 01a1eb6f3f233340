"""Mixtral between the Hub and bestiary.

The hub's expert has w1 (gate), w3 (up) and w2 (down); transformers 5 holds all experts fused, under other names.
"""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import experts, layouts, rename, tie
from bestiary.models import Mixtral
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    MoE,
    Norm,
    Router,
    RouterKind,
)

_HUB, _MODULES = "model.layers.*.block_sparse_moe", "model.layers.*.mlp"
RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.weight"),
    layouts(f"{_MODULES}.gate.weight", hub=f"{_HUB}.gate.weight", fused=f"{_MODULES}.gate.weight"),
    *experts(f"{_MODULES}.experts", hub=f"{_HUB}.experts", leaves=("w1", "w3", "w2")),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """MixtralConfig, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 32), hf.positive("hidden_size", 4096)
    heads, context = hf.positive("num_attention_heads", 32), hf.positive("max_position_embeddings", 131072)
    head_dim = hf.positive_optional("head_dim", int) or hidden // heads
    width, window = hf.positive("intermediate_size", 14336), hf.positive_optional("sliding_window", int)
    hf.inert("layer_types", allowed=(None,), why="the window holds for all layers or for none")
    return DecoderConfig(
        model_type="mixtral",
        vocab_size=hf.positive("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 8) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=hf.rope(theta=1_000_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=(LayerType.FULL if window is None else LayerType.SLIDING,) * layers,
        sliding_window=window,
        activation=hf.activation("hidden_act", Activation.SILU),
        moe=MoE(
            num_experts=hf.positive("num_local_experts", 8, alias="num_experts"),
            intermediate_size=width,
            router=Router(
                kind=RouterKind.SOFTMAX_TOPK,
                top_k=hf.positive("num_experts_per_tok", 2),
                normalize=True,
                weights_in_fp32=True,
            ),
            input_jitter=hf.take("router_jitter_noise", float, 0.0),
        ),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
        router_aux_loss_coef=hf.take("router_aux_loss_coef", float, 0.001),
        output_router_logits=hf.take("output_router_logits", bool, False),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of MixtralConfig that describe `config`."""
    moe = config.moe
    assert moe is not None
    return usual_fields(config, without=("attention_bias",)) | {
        "model_type": "mixtral",
        "rope_parameters": rope_to_hf(config.rope),
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "router_jitter_noise": moe.input_jitter,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "output_router_logits": config.output_router_logits,
    }


# fmt: off
KILL_LIST = (
    "B04*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45*", "C02*", "C03*", "C04*", "C05*",
    "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17*", "C2*",
    "C51*", "C52*", "C54*", "C58*", "C59*", "E59*", "G22a*", "G22b*", "G22c*", "H*", "K01*", "K03*", "K04*", "K05_*",
    "K06*", "K07*", "M0*", "M31*", "M32*", "M33a*", "M36*", "M4*", "N01*", "N02*", "N03*", "O40*", "T46a*", "T46b*",
    "T46c*", "T46d*", "T46e*", "T46f*", "T47a*", "T47b*", "T47c*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="mixtral",
    reference="transformers:MixtralForCausalLM",
    decoder=Mixtral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
