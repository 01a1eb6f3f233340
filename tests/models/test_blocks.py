"""Every value that `DecoderConfig` can take is needed by a Hugging Face model, and computes what that model computes.

Each case sets a tiny random transformers model (float64 with every request for fp32 promoted, eager attention and
experts, all weights perturbed) against our `Decoder` with the matching config. Weights are copied by name; where a
family names, fuses or lays out its tensors otherwise, the case says so.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.kernels.dispatch import force
from bestiary.models import Decoder, DecoderConfig
from bestiary.models import config as config_module
from bestiary.models.config import (
    MLA,
    Activation,
    Attention,
    DynamicScaling,
    HeadKind,
    LayerType,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    LoRAConfig,
    MoE,
    Norm,
    NormCast,
    NormPlacement,
    ProportionalScaling,
    QKNorm,
    QKNormSpan,
    Rope,
    RopeLayout,
    Router,
    RouterKind,
    SharedExpert,
    SwiGLUClamp,
    YarnScaling,
)
from bestiary.models.errors import InvalidConfig
from bestiary.verify.measure import bit_equal, max_over_std
from bestiary.verify.reference import build, promoted
from bestiary.verify.weights import perturb

GATE = 1e-10
HIDDEN, WIDTH, LAYERS, VOCAB, WINDOW, TOKENS = 80, 112, 3, 211, 7, 41
EXPERTS, EXPERT_WIDTH = 12, 36
ORIGINAL, CONTEXT = 16, 24  # both shorter than the input
FULL, SLIDING = LayerType.FULL, LayerType.SLIDING

INPUT_IDS = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))

State = dict[str, Tensor]


def same(state: State) -> State:
    """Names and layouts as ours."""
    return state


def renamed(*pairs: tuple[str, str]) -> Callable[[State], State]:
    """Names rewritten by regular expressions, all at once."""

    def convert(state: State) -> State:
        def name_of(name: str) -> str:
            return next((re.sub(old, new, name) for old, new in pairs if re.search(old, name)), name)

        return {name_of(name): tensor for name, tensor in state.items()}

    return convert


def split(leaf: str, parts: dict[str, int]) -> Callable[[State], State]:
    """A fused linear taken apart by rows."""

    def convert(state: State) -> State:
        out = {}
        for name, tensor in state.items():
            if f".{leaf}." not in name:
                out[name] = tensor
                continue
            for part, piece in zip(parts, tensor.split(list(parts.values())), strict=True):
                out[name.replace(leaf, part)] = piece
        return out

    return convert


def chain(*steps: Callable[[State], State]) -> Callable[[State], State]:
    """One conversion after the other."""

    def convert(state: State) -> State:
        for step in steps:
            state = step(state)
        return state

    return convert


def gpt_oss_experts(state: State) -> State:
    """Hub experts multiply from the right, and gate and up alternate."""

    def one(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("experts.down_proj"):
            return tensor.mT
        if name.endswith("experts.gate_up_proj"):
            return torch.cat((tensor[..., 0::2], tensor[..., 1::2]), -1).mT
        if name.endswith("experts.gate_up_proj_bias"):
            return torch.cat((tensor[..., 0::2], tensor[..., 1::2]), -1)
        return tensor

    return {name.replace("mlp.router", "mlp.gate"): one(name, tensor) for name, tensor in state.items()}


@dataclass(frozen=True)
class Case:
    """A transformers class with its config, our config, and the way from one set of weights to the other."""

    reference: str
    hf: dict[str, Any]
    ours: DecoderConfig
    weights: Callable[[State], State] = same


def rope_of(kind: str = "default", theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """transformers' `rope_parameters`."""
    return {"rope_type": kind, "rope_theta": theta, **more}


def hf(**changes: Any) -> dict[str, Any]:
    """Fields that all transformers configs share; None takes one out."""
    shared = {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": rope_of(),
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    merged = {**shared, **changes}
    return {name: value for name, value in merged.items() if value is not None or name.endswith("_id")}


HEADS = Attention(num_heads=4, num_kv_heads=2, head_dim=24, scale=24**-0.5)
NARROW = replace(HEADS, head_dim=20, scale=20**-0.5)  # families whose head_dim is hidden / heads
ROPE = Rope(theta=10000.0, rotary_dim=24)
NORM = Norm(eps=1e-3)
SOFTMAX_ROUTER = Router(kind=RouterKind.SOFTMAX_TOPK, top_k=3)
EXPERT = MoE(num_experts=EXPERTS, intermediate_size=EXPERT_WIDTH, router=SOFTMAX_ROUTER)

PLAIN = DecoderConfig(
    model_type="",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=LAYERS,
    attention=HEADS,
    norm=NORM,
    rope=ROPE,
    max_position_embeddings=CONTEXT,
)


def ours(**changes: Any) -> DecoderConfig:
    """Our counterpart of `hf`."""
    return PLAIN.with_(layer_types=changes.pop("layer_types", ()), **changes)


def scaled(scaling: config_module.RopeScaling, **attention: Any) -> DecoderConfig:
    """Llama with a RoPE scaling."""
    return ours(rope=replace(ROPE, scaling=scaling), attention=replace(HEADS, **attention))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 2.0, "beta_slow": 0.1}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.2}
SHORT, LONG = tuple(1.0 + i / 10 for i in range(5)), tuple(1.5 + i for i in range(5))

CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", hf(), ours()),
    "llama, llama3 scaling, biases everywhere, exact gelu, tied": Case(
        "LlamaForCausalLM",
        hf(
            rope_parameters=rope_of("llama3", **LLAMA3),
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
            tie_word_embeddings=True,
        ),
        scaled(Llama3Scaling(**LLAMA3), qkv_bias=True, out_bias=True).with_(
            mlp_bias=True, activation=Activation.GELU, tie_word_embeddings=True
        ),
    ),
    "llama, linear scaling": Case(
        "LlamaForCausalLM", hf(rope_parameters=rope_of("linear", factor=4.0)), scaled(LinearScaling(factor=4.0))
    ),
    "llama, relu, a part of the frequencies of the whole head": Case(
        "LlamaForCausalLM",
        hf(
            rope_parameters=rope_of("proportional", partial_rotary_factor=0.4, factor=2.0),
            hidden_act="relu",
        ),
        scaled(ProportionalScaling(partial_rotary_factor=0.4, factor=2.0)).with_(activation=Activation.RELU),
    ),
    "llama, relu squared": Case("LlamaForCausalLM", hf(hidden_act="relu2"), ours(activation=Activation.RELU2)),
    "llama, dynamic scaling past the context": Case(
        "LlamaForCausalLM",
        hf(rope_parameters=rope_of("dynamic", factor=3.0)),
        scaled(DynamicScaling(factor=3.0, original_max_position_embeddings=CONTEXT)),
    ),
    "llama, yarn": Case("LlamaForCausalLM", hf(rope_parameters=rope_of("yarn", **YARN)), scaled(YarnScaling(**YARN))),
    "llama, yarn untruncated with its own attention factor": Case(
        "LlamaForCausalLM",
        hf(rope_parameters=rope_of("yarn", **YARN, truncate=False, attention_factor=1.3)),
        scaled(YarnScaling(**YARN, truncate=False, attention_factor=1.3)),
    ),
    "llama, yarn with mscale": Case(
        "LlamaForCausalLM",
        hf(rope_parameters=rope_of("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2)),
        scaled(YarnScaling(**YARN, mscale=0.7, mscale_all_dim=1.2)),
    ),
    "mistral, window on every layer": Case(
        "MistralForCausalLM",
        hf(sliding_window=WINDOW),
        ours(sliding_window=WINDOW, layer_types=(SLIDING,) * LAYERS),
    ),
    "qwen2, qkv bias without o bias, window on the upper layers": Case(
        "Qwen2ForCausalLM",
        hf(head_dim=None, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        ours(
            attention=replace(NARROW, qkv_bias=True),
            rope=replace(ROPE, rotary_dim=20),
            sliding_window=WINDOW,
            layer_types=(FULL, SLIDING, SLIDING),
        ),
    ),
    "qwen3": Case("Qwen3ForCausalLM", hf(), ours(attention=replace(HEADS, qk_norm=QKNorm()))),
    "olmo2": Case(
        "Olmo2ForCausalLM",
        hf(head_dim=None),
        ours(
            attention=replace(NARROW, qk_norm=QKNorm(span=QKNormSpan.FULL)),
            rope=replace(ROPE, rotary_dim=20, turn_in_fp32=True),
            norm=replace(NORM, placement=NormPlacement.POST, cast=NormCast.SCALE_THEN_CAST),
        ),
    ),
    "olmo3, scaled RoPE on full layers only": Case(
        "Olmo3ForCausalLM",
        hf(
            head_dim=None,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": rope_of("yarn", **YARN), "sliding_attention": rope_of()},
        ),
        ours(
            attention=replace(NARROW, qk_norm=QKNorm(span=QKNormSpan.FULL)),
            rope=Rope(theta=10000.0, rotary_dim=20, turn_in_fp32=True, scaling=YarnScaling(**YARN)),
            sliding_rope=Rope(theta=10000.0, rotary_dim=20, turn_in_fp32=True),
            norm=replace(NORM, placement=NormPlacement.POST, cast=NormCast.SCALE_THEN_CAST),
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL, SLIDING),
        ),
    ),
    "glm4, interleaved RoPE on half a head, sandwich norms, fused gate and up": Case(
        "Glm4ForCausalLM",
        hf(attention_bias=True, rope_parameters=rope_of(partial_rotary_factor=0.5)),
        ours(
            attention=replace(HEADS, qkv_bias=True),
            rope=Rope(theta=10000.0, rotary_dim=12, layout=RopeLayout.INTERLEAVED),
            norm=replace(NORM, placement=NormPlacement.SANDWICH),
        ),
        chain(
            split("gate_up_proj", {"gate_proj": WIDTH, "up_proj": WIDTH}),
            renamed(
                ("post_attention_layernorm", "pre_feedforward_layernorm"),
                ("post_self_attn_layernorm", "post_attention_layernorm"),
                ("post_mlp_layernorm", "post_feedforward_layernorm"),
            ),
        ),
    ),
    "phi3, fused qkv, LongRoPE on half a head past the original context": Case(
        "Phi3ForCausalLM",
        hf(
            head_dim=None,
            sliding_window=WINDOW,
            original_max_position_embeddings=ORIGINAL,
            rope_parameters=rope_of(
                "longrope",
                short_factor=list(SHORT),
                long_factor=list(LONG),
                partial_rotary_factor=0.5,
                original_max_position_embeddings=ORIGINAL,
                attention_factor=1.2,
            ),
        ),
        ours(
            attention=NARROW,
            rope=Rope(
                theta=10000.0,
                rotary_dim=10,
                scaling=LongRopeScaling(
                    short_factor=SHORT,
                    long_factor=LONG,
                    original_max_position_embeddings=ORIGINAL,
                    attention_factor=1.2,
                ),
            ),
            sliding_window=WINDOW,
            layer_types=(SLIDING,) * LAYERS,
        ),
        chain(
            split("gate_up_proj", {"gate_proj": WIDTH, "up_proj": WIDTH}),
            split("qkv_proj", {"q_proj": 80, "k_proj": 40, "v_proj": 40}),
        ),
    ),
    "cohere2, attention beside the MLP, a norm that centres, interleaved RoPE on sliding layers alone": Case(
        "Cohere2ForCausalLM",
        hf(
            head_dim=None,
            rms_norm_eps=None,
            layer_norm_eps=1e-3,
            logit_scale=0.25,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        ours(
            attention=NARROW,
            norm=Norm(
                eps=1e-3,
                placement=NormPlacement.PARALLEL,
                cast=NormCast.SCALE_THEN_CAST,
                subtract_mean=True,
            ),
            rope=Rope(
                theta=10000.0,
                rotary_dim=20,
                layout=RopeLayout.INTERLEAVED,
                turn_in_fp32=True,
                round_tables=True,
            ),
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL, SLIDING),
            nope_layers=(1,),
            logits_divisor=4.0,
        ),
    ),
    "granite, four multipliers": Case(
        "GraniteForCausalLM",
        hf(
            head_dim=None,
            embedding_multiplier=3.3,
            residual_multiplier=0.7,
            attention_multiplier=0.4,
            logits_scaling=1.9,
            attention_bias=True,
        ),
        ours(
            attention=replace(NARROW, scale=0.4, qkv_bias=True, out_bias=True),
            rope=replace(ROPE, rotary_dim=20),
            embedding_multiplier=3.3,
            scales_inputs_embeds=True,
            residual_multiplier=0.7,
            logits_divisor=1.9,
        ),
    ),
    "arcee, no gate, biases in the MLP": Case(
        "ArceeForCausalLM",
        hf(mlp_bias=True),
        ours(mlp_bias=True, mlp_gated=False, activation=Activation.RELU2),
    ),
    "smollm3, layers without RoPE, windows on those": Case(
        "SmolLM3ForCausalLM",
        hf(
            head_dim=None,
            no_rope_layers=[1, 0, 1],
            use_sliding_window=True,
            sliding_window=WINDOW,
            rope_parameters=rope_of(theta=2e6),
        ),
        ours(
            attention=NARROW,
            rope=Rope(theta=2e6, rotary_dim=20),
            nope_layers=(1,),
            sliding_window=WINDOW,
            layer_types=(FULL, SLIDING, FULL),
        ),
    ),
    "gemma2, soft caps on attention and logits": Case(
        "Gemma2ForCausalLM",
        hf(
            query_pre_attn_scalar=13,
            sliding_window=WINDOW,
            attn_logit_softcapping=0.7,
            final_logit_softcapping=0.9,
            tie_word_embeddings=True,
        ),
        ours(
            attention=replace(HEADS, scale=13**-0.5, logit_softcap=0.7),
            norm=replace(NORM, placement=NormPlacement.SANDWICH, cast=NormCast.SCALE_THEN_CAST, plus_one=True),
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL, SLIDING),
            activation=Activation.GELU_TANH,
            tie_word_embeddings=True,
            embedding_multiplier=HIDDEN**0.5,
            embedding_multiplier_in_weight_dtype=True,
            final_logit_softcap=0.9,
        ),
    ),
    "gemma3, two RoPE kinds": Case(
        "Gemma3ForCausalLM",
        hf(
            query_pre_attn_scalar=13,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": rope_of("linear", 1e6, factor=8.0),
                "sliding_attention": rope_of(),
            },
            final_logit_softcapping=None,
            tie_word_embeddings=True,
        ),
        ours(
            attention=replace(HEADS, scale=13**-0.5, qk_norm=QKNorm()),
            norm=replace(NORM, placement=NormPlacement.SANDWICH, cast=NormCast.SCALE_THEN_CAST, plus_one=True),
            rope=Rope(theta=1e6, rotary_dim=24, scaling=LinearScaling(factor=8.0)),
            sliding_rope=ROPE,
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL, SLIDING),
            activation=Activation.GELU_TANH,
            tie_word_embeddings=True,
            embedding_multiplier=HIDDEN**0.5,
            embedding_multiplier_in_weight_dtype=True,
        ),
    ),
    "embeddinggemma, attention both ways, windows counted from side to side": Case(
        "Gemma3ForCausalLM",
        hf(
            use_bidirectional_attention=True,
            query_pre_attn_scalar=24,
            sliding_window=2 * WINDOW - 1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": rope_of(theta=1e6), "sliding_attention": rope_of()},
            tie_word_embeddings=True,
        ),
        ours(
            attention=replace(HEADS, qk_norm=QKNorm(), causal=False),
            norm=replace(NORM, placement=NormPlacement.SANDWICH, cast=NormCast.SCALE_THEN_CAST, plus_one=True),
            rope=Rope(theta=1e6, rotary_dim=24),
            sliding_rope=ROPE,
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL, SLIDING),
            activation=Activation.GELU_TANH,
            tie_word_embeddings=True,
            embedding_multiplier=HIDDEN**0.5,
            embedding_multiplier_in_weight_dtype=True,
        ),
    ),
    "hunyuan, q/k-norm after RoPE": Case(
        "HunYuanDenseV1ForCausalLM",
        hf(attention_bias=True),
        ours(attention=replace(HEADS, qkv_bias=True, out_bias=True, qk_norm=QKNorm(after_rope=True))),
        renamed(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
    ),
    "hunyuan, dynamic scaling with alpha inside the context": Case(
        "HunYuanDenseV1ForCausalLM",
        hf(max_position_embeddings=64, rope_parameters=rope_of("dynamic", factor=3.0, alpha=70.0)),
        scaled(
            DynamicScaling(factor=3.0, original_max_position_embeddings=64, alpha=70.0),
            qk_norm=QKNorm(after_rope=True),
        ),
        renamed(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
    ),
    "mixtral, renormalised softmax": Case(
        "MixtralForCausalLM",
        hf(intermediate_size=EXPERT_WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=3),
        ours(moe=replace(EXPERT, router=replace(SOFTMAX_ROUTER, normalize=True, weights_in_fp32=True))),
    ),
    "olmoe, full q/k-norm, clipped qkv, softmax as it is": Case(
        "OlmoeForCausalLM",
        hf(
            head_dim=None,
            intermediate_size=EXPERT_WIDTH,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            clip_qkv=0.5,
        ),
        ours(
            attention=replace(NARROW, qk_norm=QKNorm(span=QKNormSpan.FULL), qkv_clip=0.5),
            rope=replace(ROPE, rotary_dim=20),
            moe=EXPERT,
        ),
    ),
    "qwen2_moe, gated shared expert, a dense layer": Case(
        "Qwen2MoeForCausalLM",
        hf(
            head_dim=None,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=EXPERT_WIDTH,
            shared_expert_intermediate_size=44,
            mlp_only_layers=[1],
        ),
        ours(
            attention=replace(NARROW, qkv_bias=True),
            rope=replace(ROPE, rotary_dim=20),
            moe=replace(EXPERT, shared=SharedExpert(intermediate_size=44, gated=True)),
            dense_layers=(1,),
        ),
    ),
    "glm4_moe, sigmoid router with groups and correction bias, shared expert": Case(
        "Glm4MoeForCausalLM",
        hf(
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=EXPERT_WIDTH,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            rope_parameters=rope_of(partial_rotary_factor=0.5),
        ),
        ours(
            attention=replace(HEADS, qkv_bias=True, qk_norm=QKNorm()),
            rope=replace(ROPE, rotary_dim=12),
            moe=replace(
                EXPERT,
                router=Router(
                    kind=RouterKind.SIGMOID,
                    top_k=3,
                    normalize=True,
                    num_groups=4,
                    topk_groups=2,
                    scale=1.7,
                    weights_in_fp32=True,
                ),
                shared=SharedExpert(intermediate_size=2 * EXPERT_WIDTH),
            ),
            dense_layers=(0,),
        ),
        renamed(("shared_experts", "shared_expert")),
    ),
    "deepseek_v3, latent attention, YaRN's mscale in the scale, groups": Case(
        "DeepseekV3ForCausalLM",
        hf(
            head_dim=None,
            num_key_value_heads=4,
            attention_bias=True,
            q_lora_rank=44,
            kv_lora_rank=28,
            qk_nope_head_dim=22,
            qk_rope_head_dim=12,
            v_head_dim=18,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=EXPERT_WIDTH,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            first_k_dense_replace=1,
            rope_parameters=rope_of("yarn", **STRETCHED),
        ),
        ours(
            attention=Attention(
                num_heads=4,
                num_kv_heads=4,
                head_dim=34,
                scale=34**-0.5 * (0.1 * 1.2 * log(4.0) + 1) ** 2,
                qkv_bias=True,
                out_bias=True,
                mla=MLA(
                    q_lora_rank=44,
                    kv_lora_rank=28,
                    qk_nope_head_dim=22,
                    qk_rope_head_dim=12,
                    v_head_dim=18,
                    norm_eps=1e-6,
                ),
            ),
            rope=Rope(
                theta=10000.0,
                rotary_dim=12,
                layout=RopeLayout.INTERLEAVED,
                scaling=YarnScaling(**STRETCHED),
            ),
            moe=replace(
                EXPERT,
                router=Router(
                    kind=RouterKind.SIGMOID,
                    top_k=3,
                    normalize=True,
                    num_groups=4,
                    topk_groups=2,
                    scale=1.7,
                    weights_in_fp32=True,
                ),
                shared=SharedExpert(intermediate_size=EXPERT_WIDTH),
            ),
            dense_layers=(0,),
        ),
        renamed(("shared_experts", "shared_expert")),
    ),
    "gpt_oss, sinks, clamped SwiGLU, biases, softmax over the chosen": Case(
        "GptOssForCausalLM",
        hf(
            intermediate_size=EXPERT_WIDTH,
            num_local_experts=EXPERTS,
            num_experts_per_tok=3,
            sliding_window=WINDOW,
            swiglu_limit=0.6,
            swiglu_alpha=1.5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=rope_of("yarn", **YARN, truncate=False),
        ),
        ours(
            attention=replace(HEADS, qkv_bias=True, out_bias=True, sinks=True),
            rope=replace(ROPE, scaling=YarnScaling(**YARN, truncate=False)),
            norm=replace(NORM, cast=NormCast.SCALE_THEN_CAST),
            sliding_window=WINDOW,
            layer_types=(SLIDING, FULL, SLIDING),
            moe=replace(
                EXPERT,
                router=Router(kind=RouterKind.TOPK_SOFTMAX, top_k=3, bias=True),
                bias=True,
                clamp=SwiGLUClamp(alpha=1.5, limit=0.6),
            ),
        ),
        gpt_oss_experts,
    ),
}


def pair(case: Case, dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, Decoder]:
    """The reference with perturbed weights, and our model with the same ones."""
    reference = build(f"transformers:{case.reference}", case.hf, dtype)
    perturb(reference, seed=0)
    weights = case.weights(dict(reference.state_dict()))
    if case.ours.tie_word_embeddings:
        del weights["lm_head.weight"]
    return reference, loaded(case.ours, weights, dtype)


def loaded(config: DecoderConfig, weights: State, dtype: torch.dtype) -> Decoder:
    """A decoder with these weights and no others."""
    model = Decoder(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # a parameter that the weights miss shows
    model.load_state_dict(weights, strict=True)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_block_equals_the_hugging_face_block(name: str) -> None:
    """Logits in float64, input longer than the window and than the original context."""
    reference, model = pair(CASES[name])
    with promoted(), torch.no_grad():
        expected = reference(input_ids=INPUT_IDS, use_cache=False).logits
    with torch.no_grad():
        assert max_over_std(model(INPUT_IDS).logits, expected) <= GATE


@pytest.mark.parametrize("name", ["llama", "granite, four multipliers"])
def test_embeddings_that_are_given_are_scaled_where_hugging_face_scales_them(name: str) -> None:
    reference, model = pair(CASES[name])
    embeds = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with promoted(), torch.no_grad():
        expected = reference(inputs_embeds=embeds, use_cache=False).logits
    with torch.no_grad():
        assert max_over_std(model(inputs_embeds=embeds).logits, expected) <= GATE


# Another order of summation: the transposed products of GPT-OSS, the fused ones of Phi-3 and GLM-4. The softmax with
# sinks is wider here (docs/decisions.md).
OTHER_ROUNDING = {name for name in CASES if name.startswith(("glm4,", "phi3", "gpt_oss", "deepseek"))}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With more, a GEMM may cut its sums where the memory happens to lie: equal products are not equal bits then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(set(CASES) - OTHER_ROUNDING))
def test_block_rounds_where_the_hugging_face_block_rounds(name: str, dtype: torch.dtype) -> None:
    """Logits bit-equal with the plain paths on both sides: each cast and each product stands in the same place."""
    reference, model = pair(CASES[name], dtype)
    with torch.no_grad(), force(attention="eager", experts="loop"):
        logits = model(INPUT_IDS).logits
    with torch.no_grad():
        expected = reference(input_ids=INPUT_IDS, use_cache=False).logits
    assert bit_equal(logits, expected)


# Fields that say where a number is rounded: float64 does not show them, bfloat16 does.
ROUNDING = {
    "Norm.cast",
    "Rope.turn_in_fp32",
    "Rope.round_tables",
    "Router.weights_in_fp32",
    "DecoderConfig.embedding_multiplier_in_weight_dtype",
}
# Fields that no single forward pass shows. test_surface holds the initial weights and the runtime switches, test_losses
# the router loss, test_lora the adapters, test_generation the context, test_padding_row the pad token,
# test_dropout what attention and whole branches drop while training, test_score the score head; below stands what is
# done to given embeddings.
ELSEWHERE = {
    "DecoderConfig.head",
    "DecoderConfig.num_labels",
    str(HeadKind.SCORE),
    "Attention.dropout",
    "MoE.input_jitter",
    "DecoderConfig.residual_dropout",
    "DecoderConfig.scales_inputs_embeds",
    "DecoderConfig.initializer_range",
    "DecoderConfig.activation_checkpointing",
    "Checkpointing.part",
    "Checkpointing.every",
    "Checkpointing.first",
    "DecoderConfig.compile_blocks",
    "DecoderConfig.router_aux_loss_coef",
    "DecoderConfig.output_router_logits",
    "DecoderConfig.lora",
    "DecoderConfig.max_position_embeddings",
    "DecoderConfig.padding_idx",
}


def optional(kind: type) -> dict[str, Any]:
    """Fields of a config class that have a default, and that default."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def resets(node: Any) -> Iterator[tuple[str, Any]]:
    """(Class.field, the tree with that field at its default) for every optional field that is not at it."""
    for name, default in optional(type(node)).items():
        field, default = f"{type(node).__name__}.{name}", (FULL,) * LAYERS if name == "layer_types" else default
        if getattr(node, name) != default and field not in ELSEWHERE:
            yield field, lambda name=name, default=default: replace(node, **{name: default})
    for field in fields(node):
        child = getattr(node, field.name)
        if is_dataclass(child):
            for path, reset in resets(child):
                yield path, lambda field=field, reset=reset: replace(node, **{field.name: reset()})


def is_visible(reset: Callable[[], DecoderConfig], model: Decoder) -> bool:
    """Whether the reset config is refused, needs other weights, or computes something else."""
    try:
        other = loaded(reset(), dict(model.state_dict()), model.dtype)
    except (InvalidConfig, RuntimeError):
        return True
    with torch.no_grad():
        return max_over_std(other(INPUT_IDS).logits, model(INPUT_IDS).logits) > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_every_field_that_a_case_sets_moves_its_logits(name: str) -> None:
    """A cap that never clips or a window longer than the input would prove nothing."""
    exact, rounded = (pair(CASES[name], dtype)[1] for dtype in (torch.float64, torch.bfloat16))
    idle = [
        field
        for field, reset in resets(CASES[name].ours)
        if not is_visible(reset, rounded if field in ROUNDING else exact)
    ]
    assert idle == []


def test_every_field_and_every_enum_member_has_a_case() -> None:
    """What no Hugging Face block needs has no place in the config."""
    kinds = [kind for kind in vars(config_module).values() if isinstance(kind, type)]
    trees = [kind for kind in kinds if is_dataclass(kind) and kind is not LoRAConfig]
    needed = {f"{kind.__name__}.{name}" for kind in trees for name in optional(kind)}
    needed |= {str(member) for kind in kinds if issubclass(kind, Enum) for member in kind}
    shown = {field for case in CASES.values() for field, _ in resets(case.ours)}
    shown |= {str(member) for case in CASES.values() for member in members(case.ours)}
    assert sorted(needed - ELSEWHERE - shown) == []


def members(node: Any) -> Iterator[Enum]:
    """Enum members in a config tree."""
    for field in fields(node):
        value = getattr(node, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Enum):
                yield item
        if is_dataclass(value):
            yield from members(value)
