"""DeepSeek-V3 and R1 between the Hub and bestiary; the published fp8 weights are refused, their bf16 twins load."""

from __future__ import annotations

from math import log
from typing import Any

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields, usual_fields
from bestiary.bridges.glm4_moe import ROUTED_RULES, SHARED_MODULES, routed_from_hf, routed_to_hf
from bestiary.bridges.rope import rope_to_hf
from bestiary.bridges.rules import rename, tie
from bestiary.models import DeepseekV3
from bestiary.models.config import (
    MLA,
    Activation,
    Attention,
    DecoderConfig,
    Norm,
    Rope,
    RopeLayout,
    YarnScaling,
)

_ATTENTION = "model.layers.*.self_attn"
RULES = (
    rename("model.embed_tokens.weight"),
    rename("model.layers.*.{input,post_attention}_layernorm.weight"),
    rename(f"{_ATTENTION}.{{q_a_proj,kv_a_proj_with_mqa,o_proj}}.{{weight,bias}}"),
    rename(f"{_ATTENTION}.{{q,q_b,kv_b}}_proj.weight"),
    rename(f"{_ATTENTION}.{{q,kv}}_a_layernorm.weight"),
    *ROUTED_RULES,
    rename("model.norm.weight"),
    tie("lm_head.weight", to="model.embed_tokens.weight"),
)
_LATENT_EPS = 1e-6  # of the class, which hands its own eps to no norm of a latent


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """DeepseekV3Config, the class's defaults written out."""
    layers, heads = hf.positive("num_hidden_layers", 61), hf.positive("num_attention_heads", 128)
    context, bias = hf.positive("max_position_embeddings", 4096), hf.take("attention_bias", bool, False)
    mla = MLA(
        q_lora_rank=hf.positive_optional("q_lora_rank", int, 1536),
        kv_lora_rank=hf.positive("kv_lora_rank", 512),
        qk_nope_head_dim=hf.positive("qk_nope_head_dim", 128),
        qk_rope_head_dim=hf.positive("qk_rope_head_dim", 64),
        v_head_dim=hf.positive("v_head_dim", 128),
        norm_eps=_LATENT_EPS,
    )
    head_dim, kv_heads = mla.qk_nope_head_dim + mla.qk_rope_head_dim, hf.take_optional("num_key_value_heads", int, 128)
    if kv_heads not in (heads, None):
        what = f"is not num_attention_heads = {heads}: the latent serves every head alike."
        raise hf.unsupported("num_key_value_heads", what, remedy="set both to the same number", value=kv_heads)
    hf.inert("head_dim", allowed=(mla.qk_rope_head_dim, None), why="qk_rope_head_dim turns")
    hf.inert("qk_head_dim", allowed=(head_dim, None), why="qk_nope_head_dim + qk_rope_head_dim")
    hf.inert("moe_layer_freq", allowed=(1, None), why="every layer behind the dense ones routes")
    hf.inert("scoring_func", allowed=("sigmoid", None), why="the router is a sigmoid")
    hf.inert("topk_method", allowed=("noaux_tc", None), why="a correction bias chooses, groups first")
    for name in ("auto_map", "ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux"):
        hf.inert(name, why="of the authors' own code, read by no class of transformers")
    hf.inert("layer_types", allowed=(None,), why="its mask has no window")
    layout = RopeLayout.INTERLEAVED if hf.take("rope_interleave", bool, True) else RopeLayout.HALF
    rope = _rope(hf, layout, mla.qk_rope_head_dim, context)
    return DecoderConfig(
        model_type="deepseek_v3",
        vocab_size=hf.positive("vocab_size", 129280),
        hidden_size=hf.positive("hidden_size", 7168),
        intermediate_size=hf.positive("intermediate_size", 18432),
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 * _mscale(rope) ** 2,
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.attention_dropout(),
            mla=mla,
        ),
        norm=Norm(eps=hf.positive_float("rms_norm_eps", 1e-6)),
        rope=rope,
        activation=hf.activation("hidden_act", Activation.SILU),
        moe=routed_from_hf(hf, experts=256, width=2048, groups=(8, 4), scale=2.5),
        dense_layers=tuple(range(min(layers, hf.take("first_k_dense_replace", int, 3)))),
        tie_word_embeddings=hf.take("tie_word_embeddings", bool, False),
        padding_idx=hf.padding_idx(),
        max_position_embeddings=context,
        initializer_range=hf.initializer_range(),
    )


def _rope(hf: HFFields, layout: RopeLayout, turning: int, context: int) -> Rope:
    """The embedding; a scaling without a factor fails in the class, which reads one for its softmax scale."""
    rope = hf.rope(theta=10_000.0, rotary_dim=turning, max_positions=context)
    stated = hf.json.get("rope_parameters") or hf.json.get("rope_scaling") or {}
    if rope.scaling is not None and "factor" not in stated:
        raise hf.unsupported(
            "rope_parameters.factor", "is missing.", remedy="add it: every scaling of this family has one"
        )
    return Rope(theta=rope.theta, rotary_dim=turning, layout=layout, scaling=rope.scaling)


def _mscale(rope: Rope) -> float:
    """What YaRN multiplies queries and keys by, each."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1.0


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of DeepseekV3Config that describe `config`."""
    mla = config.attention.mla
    assert mla is not None
    return {
        **usual_fields(config, without=("head_dim",)),  # the class derives it
        **routed_to_hf(config),
        "model_type": "deepseek_v3",
        "rope_parameters": rope_to_hf(config.rope),
        "rope_interleave": config.rope.layout is RopeLayout.INTERLEAVED,
        "hidden_act": config.activation,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


# fmt: off
KILL_LIST = (
    "B01*", "B1*", "B43*", "B44a*", "B44b*", "B44c*", "B44e*", "B44f*", "B44g*", "B45b*", "B45d*", "C01*", "C05b*",
    "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*", "C16*", "C17a*",
    "C17b*", "C17d*", "C17e*", "C2*", "C5*", "D*", "E35a*", "H*", "K03*", "K04*", "K05*", "K06*", "K07*", "L08*",
    "L1*", "L2*", "L4*", "M0*", "M31*", "M32*", "M33a*", "M36*", "M37*", "M4*", "N01*", "N02*", "N03*", "O40*",
    "P05*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47c*", "T47f*", "X50c*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="deepseek_v3",
    reference="transformers:DeepseekV3ForCausalLM",
    decoder=DeepseekV3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    module_map=SHARED_MODULES,
    kill_list=KILL_LIST,
)
