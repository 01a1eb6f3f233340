"""Seed-OSS 36B, after transformers' SeedOssForCausalLM.

    x ─┬─ norm ─ q,k,v + bias ─ RoPE ─ attention ─ o ─ dropout ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ dropout ─ + ─
       └────────────────────────────────────────────────────────────┘└─────────────────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32
    logits                  the weights' dtype

q, k and v have a bias, o has a switch of its own. In training attention weights and both branches drop a tenth.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, Rope
from bestiary.models.decoder import Decoder

_36B = DecoderConfig(
    model_type="seed_oss",
    vocab_size=155136,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    attention=Attention(num_heads=80, num_kv_heads=8, head_dim=128, scale=128**-0.5, qkv_bias=True, dropout=0.1),
    norm=Norm(eps=1e-6),
    rope=Rope(theta=1e7, rotary_dim=128),
    residual_dropout=0.1,
    padding_idx=1,
    max_position_embeddings=524288,
)


class SeedOss(Decoder):
    """Seed-OSS decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"36b": _36B}
