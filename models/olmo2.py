"""OLMo 2, after transformers' Olmo2ForCausalLM (arXiv:2501.00656).

    x ─┬─ q,k,v ─ q/k-norm ─ RoPE ─ attention ─ o ─ norm ─ + ─┬─ silu(gate)·up ─ down ─ norm ─ + ─
       └──────────────────────────────────────────────────────┘└───────────────────────────────┘
    norms on what a branch gives, none on what it takes; q/k-norm over all heads together

Numeric contract            runs in
    RMSNorm × w             fp32, cast last; also q/k-norm
    RoPE                    angles, cos, sin and the turn in fp32, then cast
    softmax                 fp32, scores × head_dim^-0.5
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    Norm,
    NormCast,
    NormPlacement,
    QKNorm,
    QKNormSpan,
    Rope,
)
from bestiary.models.decoder import Decoder


def _size(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int | None = None) -> DecoderConfig:
    return DecoderConfig(
        model_type="olmo2",
        vocab_size=100352,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=heads,
            num_kv_heads=kv_heads or heads,
            head_dim=128,
            scale=128**-0.5,
            qk_norm=QKNorm(span=QKNormSpan.FULL),
        ),
        norm=Norm(eps=1e-6, placement=NormPlacement.POST, cast=NormCast.SCALE_THEN_CAST),
        rope=Rope(theta=5e5, rotary_dim=128, turn_in_fp32=True),
        max_position_embeddings=4096,
        padding_idx=100277,
    )


class Olmo2(Decoder):
    """OLMo 2 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "1b": _size(2048, 8192, 16, 16),
        "7b": _size(4096, 11008, 32, 32),
        "13b": _size(5120, 13824, 40, 40),
        "32b": _size(5120, 27648, 64, 40, 8),
    }
