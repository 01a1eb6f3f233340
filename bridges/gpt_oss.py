"""GPT-OSS between the Hub and bestiary.

The hub computes x @ W with gate and up in alternating columns, biases too; ours is W x with the gate rows first.
"""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import deinterleave, layouts, mxfp4, rename, tie, transpose
from bestiary.models import GptOss
from bestiary.models.config import (
    Attention,
    DecoderConfig,
    LayerType,
    MoE,
    Norm,
    NormCast,
    Router,
    RouterKind,
    SwiGLUClamp,
)

_EXPERTS = "model.layers.*.mlp.experts"
RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v,o}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.sinks"),
    rename("model.layers.*.mlp.gate.{weight,bias}", "model.layers.*.mlp.router.{weight,bias}"),
    layouts(
        f"{_EXPERTS}.gate_up_proj",
        bf16=deinterleave(transpose(f"{_EXPERTS}.gate_up_proj"), axis=1),  # hub: (E, H, 2I)
        mxfp4=deinterleave(mxfp4(f"{_EXPERTS}.gate_up_proj"), axis=1),  # hub: (E, 2I, H), rows alternate
    ),
    layouts(
        f"{_EXPERTS}.down_proj",
        bf16=transpose(f"{_EXPERTS}.down_proj"),  # hub: (E, I, H)
        mxfp4=mxfp4(f"{_EXPERTS}.down_proj"),  # hub: (E, H, I)
    ),
    layouts(f"{_EXPERTS}.gate_up_proj_bias", hub=deinterleave(f"{_EXPERTS}.gate_up_proj_bias", axis=1)),
    rename(f"{_EXPERTS}.down_proj_bias"),
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)

# What GptOssConfig fills in where a config says nothing about RoPE at all.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """GptOssConfig, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 36), hf.positive("hidden_size", 2880)
    heads, width = hf.positive("num_attention_heads", 64), hf.positive("intermediate_size", 2880)
    head_dim, context = hf.positive_optional("head_dim", int, 64), hf.positive("max_position_embeddings", 131072)
    head_dim = head_dim or hidden // heads
    bias, top_k = hf.take("attention_bias", bool, True), hf.positive("num_experts_per_tok", 4)
    hf.inert("experts_per_token", allowed=(top_k,), why="num_experts_per_tok is what is read")
    hf.inert("initial_context_length", why="RoPE's original_max_position_embeddings is what is read")
    hf.inert("hidden_act", allowed=("silu",), why="the experts have their own clamped activation")
    return DecoderConfig(
        model_type="gpt_oss",
        vocab_size=hf.positive("vocab_size", 201088),
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive_optional("num_key_value_heads", int, 8) or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5), cast=NormCast.SCALE_THEN_CAST),
        rope=hf.rope(theta=150_000.0, rotary_dim=head_dim, max_positions=context, default=_YARN),
        layer_types=hf.layer_types(layers, lambda i: LayerType.FULL if i % 2 else LayerType.SLIDING),
        sliding_window=hf.positive_optional("sliding_window", int, 128),
        moe=MoE(
            num_experts=hf.positive("num_local_experts", 128, alias="num_experts"),
            intermediate_size=width,
            router=Router(kind=RouterKind.TOPK_SOFTMAX, top_k=top_k, bias=True),
            bias=True,
            clamp=SwiGLUClamp(
                alpha=hf.positive_float("swiglu_alpha", 1.702),
                limit=hf.positive_float("swiglu_limit", 7.0),
            ),
        ),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
        router_aux_loss_coef=hf.take("router_aux_loss_coef", float, 0.001),
        output_router_logits=hf.take("output_router_logits", bool, False),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of GptOssConfig that describe `config`."""
    moe = config.moe
    assert moe is not None
    assert moe.clamp is not None
    return usual_fields(config) | {
        "model_type": "gpt_oss",
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "swiglu_alpha": moe.clamp.alpha,
        "swiglu_limit": moe.clamp.limit,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "output_router_logits": config.output_router_logits,
    }


# fmt: off
KILL_LIST = (
    "B04*", "B1*", "B43*", "B44*", "B45b*", "B45d*", "C02*", "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*",
    "C10*", "C12*", "C13*", "C14*", "C16*", "C17*", "C2*", "C51*", "C52*", "C54*", "C58*", "C59*", "G22*", "G23*", "H*",
    "K01*", "K03*", "K04*", "K06*", "K07*", "M0*", "M31a*", "M31c*", "M32*", "M36*", "M48*", "N01*", "N02*", "N03*",
    "N04*", "O*", "T46a*", "T46b*", "T46c*", "T46d*", "T46e*", "T46f*", "T47*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="gpt_oss",
    reference="transformers:GptOssForCausalLM",
    decoder=GptOss,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    module_map={"model.layers.*.mlp.gate": "model.layers.*.mlp.router"},
    kill_list=KILL_LIST,
)
