"""EXAONE 4.0, after transformers' Exaone4ForCausalLM (arXiv:2507.11407).

    x ─┬─ q,k,v ─ q/k-norm ─ RoPE ─ attention ─ o ─ norm ─ + ─┬─ silu(gate)·up ─ down ─ norm ─ + ─
       └──────────────────────────────────────────────────────┘└───────────────────────────────┘
    norms on what a branch gives, none on what it takes; q/k-norm for each head alone
    32B: three sliding layers (window W), then one full layer without RoPE; 1.2B: every layer full, with RoPE

Numeric contract            runs in
    RMSNorm × w             fp32, cast back before × w; also q/k-norm
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32, scores × head_dim^-0.5
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    LayerType,
    Llama3Scaling,
    Norm,
    NormPlacement,
    QKNorm,
    Rope,
)
from bestiary.models.decoder import Decoder


def _size(
    hidden: int, mlp: int, layers: int, heads: int, head_dim: int, context: int, window: int | None, *, tied: bool
) -> DecoderConfig:
    hybrid = window is not None
    return DecoderConfig(
        model_type="exaone4",
        vocab_size=102400,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=8, head_dim=head_dim, scale=head_dim**-0.5, qk_norm=QKNorm()),
        norm=Norm(eps=1e-5, placement=NormPlacement.POST),
        rope=Rope(
            theta=1e6,
            rotary_dim=head_dim,
            scaling=Llama3Scaling(
                factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
        ),
        layer_types=tuple(LayerType.SLIDING if hybrid and (i + 1) % 4 else LayerType.FULL for i in range(layers)),
        sliding_window=window,
        nope_layers=tuple(i for i in range(layers) if hybrid and (i + 1) % 4 == 0),
        tie_word_embeddings=tied,
        max_position_embeddings=context,
    )


class Exaone4(Decoder):
    """EXAONE 4.0 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "1.2b": _size(2048, 4096, 30, 32, 64, 65536, None, tied=True),
        "32b": _size(5120, 27392, 64, 40, 128, 131072, 4096, tied=False),
    }
