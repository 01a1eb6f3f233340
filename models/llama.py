"""Llama 2 and 3, after transformers' LlamaForCausalLM (arXiv:2307.09288, arXiv:2407.21783); SmolLM2 is one too.

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └───────────────────────────────────────────┘└───────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    RoPE (llama3)           angles fp32, cos and sin cast before use
    softmax                 fp32
    logits                  the weights' dtype

Llama 3.1 and later divide low frequencies by a factor; the sizes of 3.2 tie the head.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, Llama3Scaling, Norm, Rope
from bestiary.models.decoder import Decoder


def _llama3(
    hidden: int, mlp: int, layers: int, heads: int, *, head_dim: int = 128, factor: float, tied: bool = False
) -> DecoderConfig:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    return DecoderConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=8, head_dim=head_dim, scale=head_dim**-0.5),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=500_000.0, rotary_dim=head_dim, scaling=scaling),
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


_SMOLLM2_135M = DecoderConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    attention=Attention(num_heads=9, num_kv_heads=3, head_dim=64, scale=64**-0.5),
    norm=Norm(eps=1e-5),
    rope=Rope(theta=100_000.0, rotary_dim=64),
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    initializer_range=1 / 24,
)


class Llama(Decoder):
    """Llama decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, factor=32.0, tied=True),
        "3.2-3b": _llama3(3072, 8192, 28, 24, factor=32.0, tied=True),
        "3.1-8b": _llama3(4096, 14336, 32, 32, factor=8.0),
        "3.1-70b": _llama3(8192, 28672, 80, 64, factor=8.0),
        "smollm2-135m": _SMOLLM2_135M,
    }
