"""Ministral 8B, after transformers' MinistralForCausalLM.

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └───────────────────────────────────────────┘└───────────────────────────────┘
    one layer sees all, the next three see 32768 tokens back, and so on

Numeric contract            as Mistral's

The file names the type of every layer; where it names none, all slide.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, LayerType, Norm, Rope
from bestiary.models.decoder import Decoder

_8B = DecoderConfig(
    model_type="ministral",
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    attention=Attention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    norm=Norm(eps=1e-5),
    rope=Rope(theta=1e8, rotary_dim=128),
    layer_types=tuple(LayerType.SLIDING if i % 4 else LayerType.FULL for i in range(36)),
    sliding_window=32768,
    max_position_embeddings=32768,
)


class Ministral(Decoder):
    """Ministral decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"8b": _8B}
