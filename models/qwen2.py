"""Qwen2 and Qwen2.5, after transformers' Qwen2ForCausalLM (arXiv:2407.10671, arXiv:2412.15115).

    x ─┬─ norm ─ q,k,v + bias ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └──────────────────────────────────────────────────┘└───────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32
    logits                  the weights' dtype

q, k and v have a bias, o has none. The small sizes tie the head.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, Rope
from bestiary.models.decoder import Decoder


def _size(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 151936,
    context: int = 32768,
    tied: bool = False,
) -> DecoderConfig:
    head_dim = hidden // heads
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, qkv_bias=True
        ),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=1e6, rotary_dim=head_dim),
        tie_word_embeddings=tied,
        max_position_embeddings=context,
    )


class Qwen2(Decoder):
    """Qwen2 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "2.5-0.5b": _size(896, 4864, 24, 14, 2, tied=True),
        "2.5-1.5b": _size(1536, 8960, 28, 12, 2, context=131072, tied=True),
        "2.5-7b": _size(3584, 18944, 28, 28, 4, vocab=152064, context=131072),
    }
