"""Mistral 7B, after transformers' MistralForCausalLM (arXiv:2310.06825).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ silu(gate)·up ─ down ─ + ─
       └───────────────────────────────────────────┘└───────────────────────────────┘
    v0.1 sees 4096 tokens back in every layer, v0.2 and v0.3 see all

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    RoPE angles             fp32, cos and sin cast before use
    softmax                 fp32
    logits                  the weights' dtype
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, LayerType, Norm, Rope
from bestiary.models.decoder import Decoder


def _size(
    hidden: int, mlp: int, layers: int, *, vocab: int, theta: float, context: int, window: int | None = None
) -> DecoderConfig:
    return DecoderConfig(
        model_type="mistral",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=theta, rotary_dim=128),
        layer_types=(LayerType.FULL if window is None else LayerType.SLIDING,) * layers,
        sliding_window=window,
        max_position_embeddings=context,
    )


class Mistral(Decoder):
    """Mistral decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "7b-v0.1": _size(4096, 14336, 32, vocab=32000, theta=10_000.0, context=32768, window=4096),
        "7b-v0.3": _size(4096, 14336, 32, vocab=32768, theta=1e6, context=32768),
        "nemo-12b": _size(5120, 14336, 40, vocab=131072, theta=1e6, context=131072),
    }
