"""ERNIE 4.5 dense, after transformers' Ernie4_5ForCausalLM.

    x ─┬─ norm ─ q,k,v ─ RoPE (2i, 2i + 1) ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └────────────────────────────────────────────────────────┘└───────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    RoPE                    angles, cos, sin and the turn itself fp32, cast last
    softmax                 fp32
    logits                  the weights' dtype

Neighbouring coordinates turn together. The head is tied.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, Rope, RopeLayout
from bestiary.models.decoder import Decoder

_0_3B = DecoderConfig(
    model_type="ernie4_5",
    vocab_size=103424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    attention=Attention(num_heads=16, num_kv_heads=2, head_dim=128, scale=128**-0.5),
    norm=Norm(eps=1e-5),
    rope=Rope(theta=500_000.0, rotary_dim=128, layout=RopeLayout.INTERLEAVED, turn_in_fp32=True),
    tie_word_embeddings=True,
    padding_idx=0,
    max_position_embeddings=131072,
)


class Ernie45(Decoder):
    """ERNIE 4.5 dense decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"0.3b": _0_3B}
