"""Qwen3, after transformers' Qwen3ForCausalLM (arXiv:2505.09388).

    x ─┬─ norm ─ q,k,v ─ q/k-norm ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └──────────────────────────────────────────────────────┘└────────────────────────────────┘

Numeric contract            runs in
    RMSNorm, q/k-norm       fp32, cast, then × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32
    logits                  the weights' dtype

A head is 128 wide whatever hidden / heads is, so o_proj is not square. The small sizes tie the head.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, QKNorm, Rope
from bestiary.models.decoder import Decoder


def _size(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int = 8, tied: bool = False) -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, scale=128**-0.5, qk_norm=QKNorm()),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=1e6, rotary_dim=128),
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
    )


class Qwen3(Decoder):
    """Qwen3 dense decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "0.6b": _size(1024, 3072, 28, 16, tied=True),
        "1.7b": _size(2048, 6144, 28, 16, tied=True),
        "4b": _size(2560, 9728, 36, 32, tied=True),
        "8b": _size(4096, 12288, 36, 32),
        "14b": _size(5120, 17408, 40, 40),
        "32b": _size(5120, 25600, 64, 64),
    }
