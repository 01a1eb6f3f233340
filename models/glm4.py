"""GLM-4 (0414), after transformers' Glm4ForCausalLM (arXiv:2406.12793).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ norm ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ norm ─ + ─
       └──────────────────────────────────────────────────┘└───────────────────────────────────────┘
    RoPE turns neighbouring pairs of the first half of each head; few key/value heads; the hub stores gate and up as one

Numeric contract            runs in
    RMSNorm × w             fp32, cast back before × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32, scores × head_dim^-0.5
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, NormPlacement, Rope, RopeLayout
from bestiary.models.decoder import Decoder


def _size(hidden: int, mlp: int, layers: int, heads: int, *, bias: bool) -> DecoderConfig:
    return DecoderConfig(
        model_type="glm4",
        vocab_size=151552,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=2, head_dim=128, scale=128**-0.5, qkv_bias=bias),
        norm=Norm(eps=1e-5, placement=NormPlacement.SANDWICH),
        rope=Rope(theta=1e4, rotary_dim=64, layout=RopeLayout.INTERLEAVED),
        max_position_embeddings=32768,
        padding_idx=151329,
    )


class Glm4(Decoder):
    """GLM-4 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "9b": _size(4096, 13696, 40, 32, bias=True),
        "32b": _size(6144, 23040, 61, 48, bias=False),
    }
