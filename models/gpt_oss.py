"""GPT-OSS, after transformers' GptOssForCausalLM (arXiv:2508.10925).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention with sinks ─ o ─ + ─┬─ norm ─ router ─ top-k experts ─ Σ ─ + ─
       └──────────────────────────────────────────────────────┘└──────────────────────────────────────┘
    sliding layers (128 tokens) and full layers alternate, sliding first; every layer routes

Numeric contract            runs in
    RMSNorm                 fp32, × w in fp32, cast last
    RoPE (YaRN)             angles fp32; the factor 1.3466 on cos and sin, cast before use
    softmax with sink       one more logit per head, column dropped; at least fp32
    router                  linear + bias in model dtype, top-k on logits, softmax over the chosen k
    experts                 gate ≤ 7, |up| ≤ 7, gate·sigmoid(1.702·gate)·(up + 1), biases before the routing weight
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    LayerType,
    MoE,
    Norm,
    NormCast,
    Rope,
    Router,
    RouterKind,
    SwiGLUClamp,
    YarnScaling,
)
from bestiary.models.decoder import Decoder


def _size(layers: int, experts: int) -> DecoderConfig:
    yarn = YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    return DecoderConfig(
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=64, num_kv_heads=8, head_dim=64, scale=64**-0.5, qkv_bias=True, out_bias=True, sinks=True
        ),
        norm=Norm(eps=1e-5, cast=NormCast.SCALE_THEN_CAST),
        rope=Rope(theta=150000.0, rotary_dim=64, scaling=yarn),
        layer_types=tuple(LayerType.FULL if i % 2 else LayerType.SLIDING for i in range(layers)),
        sliding_window=128,
        moe=MoE(
            num_experts=experts,
            intermediate_size=2880,
            router=Router(kind=RouterKind.TOPK_SOFTMAX, top_k=4, bias=True),
            bias=True,
            clamp=SwiGLUClamp(alpha=1.702, limit=7.0),
        ),
        max_position_embeddings=131072,
        router_aux_loss_coef=0.9,
    )


class GptOss(Decoder):
    """GPT-OSS decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"20b": _size(24, 32), "120b": _size(36, 128)}
