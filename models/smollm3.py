"""SmolLM3 3B, after transformers' SmolLM3ForCausalLM.

    x ─┬─ norm ─ q,k,v ─ (RoPE) ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └─────────────────────────────────────────────┘└───────────────────────────────┘
    every fourth layer has no RoPE

Numeric contract            as Llama's

Windows are off in the published model; where they are on, they hold on the layers without RoPE. The head is tied.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, Rope
from bestiary.models.decoder import Decoder

_3B = DecoderConfig(
    model_type="smollm3",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    attention=Attention(num_heads=16, num_kv_heads=4, head_dim=128, scale=128**-0.5),
    norm=Norm(eps=1e-6),
    rope=Rope(theta=5e6, rotary_dim=128),
    nope_layers=tuple(range(3, 36, 4)),
    tie_word_embeddings=True,
    padding_idx=128004,
    max_position_embeddings=65536,
)


class SmolLM3(Decoder):
    """SmolLM3 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {"3b": _3B}
