"""Granite 3, after transformers' GraniteForCausalLM.

    × e ─ x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ × r ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ × r ─ + ─ … head ÷ s
             └─────────────────────────────────────────────────┘└─────────────────────────────────────┘

Numeric contract            runs in
    multipliers             e on the embeddings, also on those a caller gives; r on branches; s under the logits; all
                            in the model's dtype
    RMSNorm                 fp32, cast, then × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32, of q·k times a scale that the config names

The head is tied.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Norm, Rope
from bestiary.models.decoder import Decoder


def _size(hidden: int, mlp: int, *, scale: float, divisor: float, theta: float, vocab: int = 49155) -> DecoderConfig:
    head_dim = hidden // 32
    return DecoderConfig(
        model_type="granite",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=40,
        attention=Attention(num_heads=32, num_kv_heads=8, head_dim=head_dim, scale=scale),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=theta, rotary_dim=head_dim),
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        scales_inputs_embeds=True,
        residual_multiplier=0.22,
        logits_divisor=divisor,
        padding_idx=0,
        max_position_embeddings=131072,
    )


class Granite(Decoder):
    """Granite decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "3.1-2b": _size(2048, 8192, scale=1 / 64, divisor=8.0, theta=5e6),
        "3.3-8b": _size(4096, 12800, scale=1 / 128, divisor=16.0, theta=1e7, vocab=49159),
    }
