"""Phi-3 and Phi-4, after transformers' Phi3ForCausalLM (arXiv:2404.14219, arXiv:2412.08905).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └───────────────────────────────────────────┘└───────────────────────────────┘
    one window for every layer, or none; the hub stores q, k, v as one tensor, gate and up as another
    long contexts turn by LongRoPE: one factor a frequency, another list past the original context

Numeric contract            runs in
    RMSNorm × w             fp32, cast back before × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32, scores × head_dim^-0.5
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, LayerType, Norm, Rope
from bestiary.models.decoder import Decoder


def _size(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int,
    window: int | None = None,
    vocab: int = 32064,
    theta: float = 1e4,
    context: int = 4096,
    pad: int = 32000,
) -> DecoderConfig:
    return DecoderConfig(
        model_type="phi3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=theta, rotary_dim=head_dim),
        layer_types=(LayerType.FULL if window is None else LayerType.SLIDING,) * layers,
        sliding_window=window,
        max_position_embeddings=context,
        padding_idx=pad,
    )


class Phi3(Decoder):
    """Phi-3 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "mini-4k": _size(3072, 8192, 32, 32, 32, head_dim=96, window=2047),
        "medium-4k": _size(5120, 17920, 40, 40, 10, head_dim=128, window=2047),
        "phi-4": _size(5120, 17920, 40, 40, 10, head_dim=128, vocab=100352, theta=250000.0, context=16384, pad=100349),
    }
