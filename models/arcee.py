"""Arcee AFM 4.5B, after transformers' ArceeForCausalLM.

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ up ─ relu² ─ down ─ + ─
       └───────────────────────────────────────────┘└────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    RoPE (YaRN)             angles fp32, cos and sin cast before use
    softmax                 fp32
    relu²                   the weights' dtype

The MLP has no gate.
"""

from typing import ClassVar

from bestiary.models.config import Activation, Attention, DecoderConfig, Norm, Rope, YarnScaling
from bestiary.models.decoder import Decoder

_AFM_4_5B = DecoderConfig(
    model_type="arcee",
    vocab_size=128005,
    hidden_size=2560,
    intermediate_size=18432,
    num_hidden_layers=36,
    attention=Attention(num_heads=20, num_kv_heads=4, head_dim=128, scale=128**-0.5),
    norm=Norm(eps=1e-5),
    rope=Rope(
        theta=10_000.0,
        rotary_dim=128,
        scaling=YarnScaling(factor=20.0, original_max_position_embeddings=4096, mscale=1.0),
    ),
    activation=Activation.RELU2,
    mlp_gated=False,
    max_position_embeddings=65536,
)


class Arcee(Decoder):
    """Arcee decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"afm-4.5b": _AFM_4_5B}
