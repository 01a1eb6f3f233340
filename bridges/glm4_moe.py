"""GLM-4.5 and GLM-4.6 (glm4_moe) between the Hub and bestiary."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import experts, ignore_layers, rename, tie
from bestiary.models import Glm4MoE
from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    MoE,
    Norm,
    QKNorm,
    Router,
    RouterKind,
    SharedExpert,
)

_MLP = "model.layers.*.mlp"
ROUTED_RULES = (
    rename(f"{_MLP}.gate.{{weight,e_score_correction_bias}}"),
    *experts(f"{_MLP}.experts"),
    rename(f"{_MLP}.shared_expert.{{gate,up,down}}_proj.weight", f"{_MLP}.shared_experts.{{gate,up,down}}_proj.weight"),
    rename(f"{_MLP}.{{gate,up,down}}_proj.weight"),  # dense layers
    ignore_layers(
        "model.layers.*.eh_proj.weight", reason="predicts further tokens, which only speculative decoding uses"
    ),
)
SHARED_MODULES = {f"{_MLP}.shared_expert": f"{_MLP}.shared_experts"}
RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename("model.layers.*.self_attn.{q,k,v}_proj.{weight,bias}"),
    rename("model.layers.*.self_attn.o_proj.weight"),
    rename("model.layers.*.self_attn.{q,k}_norm.weight"),
    *ROUTED_RULES,
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)


def routed_from_hf(hf: HFFields, *, experts: int, width: int, groups: tuple[int, int], scale: float) -> MoE:
    """The experts of GLM-4.5 and DeepSeek-V3; the arguments are the class's own defaults."""
    inner, count = hf.positive("moe_intermediate_size", width), _count(hf, experts, groups)
    hf.inert("output_router_logits", why="an extra output: the model has no loss of its own for them")
    hf.inert("num_nextn_predict_layers", why="layers for speculative decoding are not built")
    hf.inert("num_mtp_layers", why="another name of num_nextn_predict_layers")
    return MoE(
        num_experts=count,
        intermediate_size=inner,
        router=Router(
            kind=RouterKind.SIGMOID,
            top_k=hf.positive("num_experts_per_tok", 8),
            normalize=hf.take("norm_topk_prob", bool, True),
            num_groups=hf.positive("n_group", groups[0]),
            topk_groups=hf.positive("topk_group", groups[1]),
            scale=hf.take("routed_scaling_factor", float, scale),
            weights_in_fp32=True,
        ),
        shared=SharedExpert(intermediate_size=inner * hf.positive("n_shared_experts", 1)),
    )


def _count(hf: HFFields, default: int, groups: tuple[int, int]) -> int:
    """How many experts, which groups of equal size share, two at least in each: a group counts by its two best."""
    count = hf.positive("n_routed_experts", default, alias="num_local_experts")
    parts, chosen = hf.positive("n_group", groups[0]), hf.positive("topk_group", groups[1])
    if count % parts or count < 2 * parts or chosen > parts:
        what = f"with topk_group = {chosen} does not fit n_routed_experts (num_local_experts) = {count}."
        raise hf.unsupported(
            "n_group", what, remedy="groups of equal size, two experts or more; no more chosen", value=parts
        )
    return count


def routed_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `routed_from_hf` reads, and how many layers are dense."""
    moe = config.moe
    assert moe is not None
    assert moe.shared is not None
    return {
        "moe_intermediate_size": moe.intermediate_size,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared.intermediate_size // moe.intermediate_size,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.normalize,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.topk_groups,
        "routed_scaling_factor": moe.router.scale,
        "first_k_dense_replace": len(config.dense_layers),
    }


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """Glm4MoeConfig, the class's defaults written out."""
    layers, hidden = hf.positive("num_hidden_layers", 46), hf.positive("hidden_size", 4096)
    heads, context = hf.positive("num_attention_heads", 96), hf.positive("max_position_embeddings", 131072)
    head_dim = hf.positive("head_dim", hidden // heads)  # no field of the class, yet its attention reads it
    hf.inert("layer_types", allowed=(None,), why="its mask has no window")
    return DecoderConfig(
        model_type="glm4_moe",
        vocab_size=hf.positive("vocab_size", 151552),
        hidden_size=hidden,
        intermediate_size=hf.positive("intermediate_size", 10944),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=hf.positive("num_key_value_heads", 8),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=hf.take("attention_bias", bool, False),
            qk_norm=QKNorm() if hf.take("use_qk_norm", bool, False) else None,
            dropout=hf.attention_dropout(),
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-5)),
        rope=hf.rope(theta=10_000.0, rotary_dim=head_dim, max_positions=context, share=0.5),
        activation=hf.activation("hidden_act", Activation.SILU),
        moe=routed_from_hf(hf, experts=128, width=1408, groups=(1, 1), scale=1.0),
        dense_layers=tuple(range(min(layers, hf.take("first_k_dense_replace", int, 1)))),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Glm4MoeConfig that describe `config`."""
    return {
        **usual_fields(config),
        **routed_to_hf(config),
        "model_type": "glm4_moe",
        "rope_parameters": rope_to_hf(config.rope, config.attention.head_dim),
        "hidden_act": config.activation,
        "use_qk_norm": config.attention.qk_norm is not None,
    }


# fmt: off
KILL_LIST = (
    "B*", "C0*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*", "C17b*", "C17d*", "C17e*",
    "C2*", "C5*", "D*", "E35a*", "H*", "K03*", "K04*", "K05*", "K06*", "K07*", "M0*", "M31*", "M32*", "M33a*", "M36*",
    "M37*", "M4*", "N01*", "N02*", "N03*", "O40*", "Q*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47c*", "T47e*",
    "T47f*", "X50b*", "X50c*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="glm4_moe",
    reference="transformers:Glm4MoeForCausalLM",
    decoder=Glm4MoE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    module_map=SHARED_MODULES,
    kill_list=KILL_LIST,
)
