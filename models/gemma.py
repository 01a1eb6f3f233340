"""Gemma, after transformers' GemmaForCausalLM (arXiv:2403.08295).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ gelu(gate)·up ─ down ─ + ─
       └───────────────────────────────────────────┘└───────────────────────────────┘
    every layer sees everything; heads are wider than hidden / heads

Numeric contract            runs in
    embedding × √H          √H rounded to the weight's dtype first
    RMSNorm × (1 + w)       fp32, cast last
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32, scores × head_dim^-0.5
"""

from typing import ClassVar

from bestiary.models.config import Activation, Attention, DecoderConfig, Norm, NormCast, Rope
from bestiary.models.decoder import Decoder


def _size(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="gemma",
        vocab_size=256000,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=256, scale=256**-0.5),
        norm=Norm(eps=1e-6, cast=NormCast.SCALE_THEN_CAST, plus_one=True),
        rope=Rope(theta=1e4, rotary_dim=256),
        activation=Activation.GELU_TANH,
        tie_word_embeddings=True,
        embedding_multiplier=hidden**0.5,
        embedding_multiplier_in_weight_dtype=True,
        max_position_embeddings=8192,
        padding_idx=0,
    )


class Gemma(Decoder):
    """Gemma decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "2b": _size(2048, 16384, 18, 8, 1),
        "7b": _size(3072, 24576, 28, 16, 16),
    }
