"""OLMoE between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import experts, rename, tie
from bestiary.models import Olmoe
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    MoE,
    Norm,
    QKNorm,
    QKNormSpan,
    Router,
    RouterKind,
)

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.{q,k}_norm.weight"),
    rename("model.layers.*.mlp.gate.weight"),
    *experts("model.layers.*.mlp.experts"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """OlmoeConfig, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 16), hf.positive("hidden_size", 2048)
    heads, context = hf.positive("num_attention_heads", 16), hf.positive("max_position_embeddings", 4096)
    head_dim, width = hidden // heads, hf.positive("intermediate_size", 2048)
    bias = hf.take("attention_bias", bool, False)
    hf.inert("head_dim", allowed=(head_dim, None), why="the query norm has the width of the model")
    hf.inert("sliding_window", allowed=(None,), why="its mask has no window, a cache and some kernels would have one")
    hf.inert("layer_types", allowed=(None,), why="its mask has no window")
    return DecoderConfig(
        model_type="olmoe",
        vocab_size=hf.positive("vocab_size", 50304),
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(span=QKNormSpan.FULL),
            qkv_clip=hf.positive_optional("clip_qkv", float),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        activation=hf.activation("hidden_act", Activation.SILU),
        moe=MoE(
            num_experts=hf.positive("num_experts", 64, alias="num_local_experts"),
            intermediate_size=width,
            router=Router(
                kind=RouterKind.SOFTMAX_TOPK,
                top_k=hf.positive("num_experts_per_tok", 8),
                normalize=hf.take("norm_topk_prob", bool, False),
            ),
        ),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(1),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
        router_aux_loss_coef=hf.take("router_aux_loss_coef", float, 0.01),
        output_router_logits=hf.take("output_router_logits", bool, False),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of OlmoeConfig that describe `config`."""
    moe = config.moe
    assert moe is not None
    return usual_fields(config, without=("head_dim",)) | {  # its heads have hidden_size / heads
        "model_type": "olmoe",
        "rope_parameters": rope_to_hf(config.rope),
        "hidden_act": config.activation,
        "clip_qkv": config.attention.qkv_clip,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "output_router_logits": config.output_router_logits,
    }


# fmt: off
KILL_LIST = (
    "B04*", "B1*", "B43*", "B44a*", "B44b*", "B44c*", "B44e*", "B44f*", "B44g*", "B45*", "C02*", "C04*", "C05*", "C06*",
    "C07*", "C08*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*",
    "C17e*", "C2*", "C51*", "C53*", "C54*", "C58*", "C59*", "E2*", "H*", "K03*", "K04*", "K05_*", "K06*", "K07*", "M0*",
    "M31*", "M32*", "M33*", "M36*", "M4*", "N01*", "N02*", "N03*", "O40*", "T46a*", "T46b*", "T46c*", "T46d*", "T46e*",
    "T46f*", "T47a*", "T47b*", "T47c*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="olmoe",
    reference="transformers:OlmoeForCausalLM",
    decoder=Olmoe,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
