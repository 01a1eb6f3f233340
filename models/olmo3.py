"""OLMo 3, after transformers' Olmo3ForCausalLM (arXiv:2512.13961).

    x ─┬─ q,k,v ─ q/k-norm ─ RoPE ─ attention ─ o ─ norm ─ + ─┬─ silu(gate)·up ─ down ─ norm ─ + ─
       └──────────────────────────────────────────────────────┘└───────────────────────────────┘
    OLMo 2's block; three sliding layers (window W), then one full layer, whose RoPE alone is scaled (YaRN)

Numeric contract            runs in
    RMSNorm × w             fp32, cast last; also q/k-norm, over all heads together
    RoPE                    angles, cos, sin and the turn in fp32, then cast
    softmax                 fp32, scores × head_dim^-0.5
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
    QKNorm,
    QKNormSpan,
    Rope,
    YarnScaling,
)
from bestiary.models.decoder import Decoder

_YARN = YarnScaling(
    factor=8.0,
    original_max_position_embeddings=8192,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=1.2079441541679836,
)


def _size(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int | None = None) -> DecoderConfig:
    return DecoderConfig(
        model_type="olmo3",
        vocab_size=100278,
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
        rope=Rope(theta=5e5, rotary_dim=128, turn_in_fp32=True, scaling=_YARN),
        sliding_rope=Rope(theta=5e5, rotary_dim=128, turn_in_fp32=True),
        layer_types=tuple(LayerType.SLIDING if (i + 1) % 4 else LayerType.FULL for i in range(layers)),
        sliding_window=4096,
        max_position_embeddings=65536,
        padding_idx=100277,
    )


class Olmo3(Decoder):
    """OLMo 3 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "7b": _size(4096, 11008, 32, 32),
        "32b": _size(5120, 27648, 64, 40, 8),
    }
