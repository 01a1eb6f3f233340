"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B) between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import experts, rename, tie
from bestiary.models import Qwen2MoE
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    MoE,
    Norm,
    Router,
    RouterKind,
    SharedExpert,
)

RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.o_proj.weight"),
    rename("model.layers.*.mlp.gate.weight"),
    *experts("model.layers.*.mlp.experts"),
    rename("model.layers.*.mlp.shared_expert.{gate,up,down}_proj.weight"),
    rename("model.layers.*.mlp.shared_expert_gate.weight"),
    rename("model.layers.*.mlp.{gate,up,down}_proj.weight"),  # dense layers
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Qwen2MoeConfig, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 24), hf.positive("hidden_size", 2048)
    heads, context = hf.positive("num_attention_heads", 16), hf.positive("max_position_embeddings", 32768)
    head_dim = hf.positive("head_dim", hidden // heads)  # no field of the class, yet its attention reads it
    slides, window = hf.take("use_sliding_window", bool, False), hf.switched_window(4096)
    full_from = hf.take("max_window_layers", int, 28)

    def kind(index: int) -> LayerType:
        return LayerType.SLIDING if slides and index % 2 == 0 and index < full_from else LayerType.FULL

    step, dense = hf.positive("decoder_sparse_step", 1), hf.layer_indices("mlp_only_layers", layers)
    return DecoderConfig(
        model_type="qwen2_moe",
        vocab_size=hf.positive("vocab_size", 151936),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 5632),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 16),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=hf.take("qkv_bias", bool, True),
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context),
        layer_types=hf.layer_types(layers, kind),
        sliding_window=window,
        activation=hf.activation("hidden_act", Activation.SILU),
        moe=MoE(
            num_experts=hf.positive("num_experts", 60),
            intermediate_size=hf.positive("moe_intermediate_size", 1408),
            router=Router(
                kind=RouterKind.SOFTMAX_TOPK,
                top_k=hf.positive("num_experts_per_tok", 4),
                normalize=hf.take("norm_topk_prob", bool, False),
            ),
            shared=SharedExpert(
                intermediate_size=hf.positive("shared_expert_intermediate_size", 5632),
                gated=True,
            ),
        ),
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
        router_aux_loss_coef=hf.take("router_aux_loss_coef", float, 0.001),
        output_router_logits=hf.take("output_router_logits", bool, False),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Qwen2MoeConfig that describe `config`."""
    moe = config.moe
    assert moe is not None
    assert moe.shared is not None
    return usual_fields(config, without=("attention_bias",)) | {
        "model_type": "qwen2_moe",
        "qkv_bias": config.attention.qkv_bias,  # the output projection has none in any case
        "rope_parameters": rope_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "hidden_act": config.activation,
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared.intermediate_size,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "output_router_logits": config.output_router_logits,
    }


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45b*", "B45d*", "C01*", "C02*",
    "C03*", "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*",
    "C16*", "C17*", "C2*", "C51*", "C52*", "C54*", "C58*", "C59*", "E3*", "G22*", "G23*", "H*", "K01*", "K03*", "K04*",
    "K05*", "K06*", "K07*", "M*", "N01*", "N02*", "N03*", "O4*", "O5*", "T46a*", "T46b*", "T46c*", "T46d*", "T46e*",
    "T46f*", "T47a*", "T47b*", "T47c*", "T47e*", "T47f*", "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="qwen2_moe",
    reference="transformers:Qwen2MoeForCausalLM",
    decoder=Qwen2MoE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
