"""Command R7B and Command A, after transformers' Cohere2ForCausalLM (arXiv:2504.00698).

    x ─┬─ norm ─┬─ q,k,v ─ RoPE ─ attention ─ o ─ + ─ + ─
       │        └─ silu(gate)·up ─ down ──────────┘   │
       └──────────────────────────────────────────────┘
    three sliding layers (window W), then one full layer without RoPE; logits times a scale

Numeric contract            runs in
    LayerNorm × w           fp32, no bias, cast last
    RoPE                    angles fp32, cos and sin rounded to the model's dtype, the turn in fp32; pairs (2i, 2i + 1)
    softmax                 fp32, scores × head_dim^-0.5
    logits × logit_scale    logits dtype
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    LayerType,
    Norm,
    NormCast,
    NormPlacement,
    Rope,
    RopeLayout,
)
from bestiary.models.decoder import Decoder


def _size(hidden: int, mlp: int, layers: int, heads: int, context: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="cohere2",
        vocab_size=256000,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=8, head_dim=128, scale=128**-0.5),
        norm=Norm(eps=1e-5, placement=NormPlacement.PARALLEL, cast=NormCast.SCALE_THEN_CAST, subtract_mean=True),
        rope=Rope(theta=5e4, rotary_dim=128, layout=RopeLayout.INTERLEAVED, turn_in_fp32=True, round_tables=True),
        layer_types=tuple(LayerType.SLIDING if (i + 1) % 4 else LayerType.FULL for i in range(layers)),
        sliding_window=4096,
        nope_layers=tuple(i for i in range(layers) if (i + 1) % 4 == 0),
        tie_word_embeddings=True,
        logits_divisor=4.0,
        max_position_embeddings=context,
        padding_idx=0,
    )


class Cohere2(Decoder):
    """Cohere 2 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "r7b": _size(4096, 14336, 32, 32, 132096),
        "a-111b": _size(12288, 36864, 64, 96, 131072),
    }
