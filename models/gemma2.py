"""Gemma 2, after transformers' Gemma2ForCausalLM (arXiv:2408.00118).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ norm ─ + ─┬─ norm ─ gelu(gate)·up ─ down ─ norm ─ + ─
       └──────────────────────────────────────────────────┘└───────────────────────────────────────┘
    a sliding layer (window W), then a full one; one RoPE for both

Numeric contract            runs in
    embedding × √H          √H rounded to the weight's dtype first
    RMSNorm × (1 + w)       fp32, cast last
    RoPE angles             fp32, cos and sin cast before use
    soft cap on scores      scores dtype, scores × query_pre_attn_scalar^-0.5 first
    softmax                 fp32
    soft cap on logits      logits dtype
"""

from typing import ClassVar

from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
    Rope,
)
from bestiary.models.decoder import Decoder


def _size(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, head_dim: int = 256, query_scalar: int = 256
) -> DecoderConfig:
    return DecoderConfig(
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=query_scalar**-0.5,
            logit_softcap=50.0,
        ),
        norm=Norm(eps=1e-6, placement=NormPlacement.SANDWICH, cast=NormCast.SCALE_THEN_CAST, plus_one=True),
        rope=Rope(theta=1e4, rotary_dim=head_dim),
        layer_types=tuple(LayerType.FULL if i % 2 else LayerType.SLIDING for i in range(layers)),
        sliding_window=4096,
        activation=Activation.GELU_TANH,
        tie_word_embeddings=True,
        embedding_multiplier=hidden**0.5,
        embedding_multiplier_in_weight_dtype=True,
        final_logit_softcap=30.0,
        max_position_embeddings=8192,
        padding_idx=0,
    )


class Gemma2(Decoder):
    """Gemma 2 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "2b": _size(2304, 9216, 26, 8, 4),
        "9b": _size(3584, 14336, 42, 16, 8),
        "27b": _size(4608, 36864, 46, 32, 16, head_dim=128, query_scalar=144),
    }
