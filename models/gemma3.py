"""Gemma 3 (text), after transformers' Gemma3ForCausalLM (arXiv:2503.19786).

    x ─┬─ norm ─ q,k,v ─ q/k-norm ─ RoPE ─ attention ─ o ─ norm ─ + ─┬─ norm ─ gelu(gate)·up ─ down ─ norm ─ + ─
       └─────────────────────────────────────────────────────────────┘└───────────────────────────────────────┘
    five sliding layers (window W, theta 1e4), then one full layer (theta 1e6, linear scaling from 4B up)

Numeric contract            runs in
    embedding × √H          √H rounded to the weight's dtype first
    RMSNorm × (1 + w)       fp32, cast last; also q/k-norm
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32, scores × query_pre_attn_scalar^-0.5
    soft cap on logits      logits dtype
"""

from typing import ClassVar

from bestiary.models.config import (
    Activation,
    Attention,
    DecoderConfig,
    LayerType,
    LinearScaling,
    Norm,
    NormCast,
    NormPlacement,
    QKNorm,
    Rope,
)
from bestiary.models.decoder import Decoder


def _size(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    window: int,
    *,
    head_dim: int = 256,
    query_scalar: int = 256,
    scaled: bool = True,
    vocab: int = 262208,
    context: int = 131072,
) -> DecoderConfig:
    return DecoderConfig(
        model_type="gemma3_text",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=query_scalar**-0.5, qk_norm=QKNorm()
        ),
        norm=Norm(eps=1e-6, placement=NormPlacement.SANDWICH, cast=NormCast.SCALE_THEN_CAST, plus_one=True),
        rope=Rope(theta=1e6, rotary_dim=head_dim, scaling=LinearScaling(factor=8.0) if scaled else None),
        sliding_rope=Rope(theta=1e4, rotary_dim=head_dim),
        layer_types=tuple(LayerType.SLIDING if (i + 1) % 6 else LayerType.FULL for i in range(layers)),
        sliding_window=window,
        activation=Activation.GELU_TANH,
        tie_word_embeddings=True,
        embedding_multiplier=hidden**0.5,
        embedding_multiplier_in_weight_dtype=True,
        max_position_embeddings=context,
    )


class Gemma3(Decoder):
    """Gemma 3 text decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "270m": _size(640, 2048, 18, 4, 1, 512, scaled=False, vocab=262144, context=32768),
        "1b": _size(1152, 6912, 26, 4, 1, 512, scaled=False, vocab=262144, context=32768),
        "4b": _size(2560, 10240, 34, 8, 4, 1024),
        "12b": _size(3840, 15360, 48, 16, 8, 1024),
        "27b": _size(5376, 21504, 62, 32, 16, 1024, head_dim=128, query_scalar=168),
    }
