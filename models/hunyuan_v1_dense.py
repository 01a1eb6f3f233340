"""HunYuan dense (v1), after transformers' HunYuanDenseV1ForCausalLM.

    x ─┬─ norm ─ q,k,v ─ RoPE ─ q/k-norm ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └──────────────────────────────────────────────────────┘└───────────────────────────────┘

Numeric contract            runs in
    RMSNorm, q/k-norm       fp32, cast, then × w
    RoPE (dynamic)          angles fp32, cos and sin cast before use
    softmax                 fp32
    logits                  the weights' dtype

Queries and keys are normalised after they turn. Inside the context the base of RoPE is theta · alpha^(d / (d − 2));
beyond it transformers forgets alpha and stretches theta by the length.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, DynamicScaling, Norm, QKNorm, Rope
from bestiary.models.decoder import Decoder

_7B = DecoderConfig(
    model_type="hunyuan_v1_dense",
    vocab_size=128167,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    attention=Attention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, qk_norm=QKNorm(after_rope=True)),
    norm=Norm(eps=1e-5),
    rope=Rope(
        theta=10_000.0,
        rotary_dim=128,
        scaling=DynamicScaling(factor=1.0, original_max_position_embeddings=262144, alpha=1000.0),
    ),
    padding_idx=127961,
    max_position_embeddings=262144,
)


class HunYuanDenseV1(Decoder):
    """HunYuan dense decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"7b": _7B}
