"""Mixtral, after transformers' MixtralForCausalLM (arXiv:2401.04088).

    x ─┬─ norm ─ q,k,v ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ router ─ top-k experts ─ Σ ─ + ─
       └───────────────────────────────────────────┘└─────────────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    softmax                 fp32
    router                  logits in model dtype, softmax over all experts fp32, top-k, renormalised, kept in fp32
    experts                 model dtype; the product with an fp32 weight in fp32, cast before the sum

Every layer routes; the experts are as wide as a dense MLP would be. A window, where the config has one, holds in every
layer.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, MoE, Norm, Rope, Router, RouterKind
from bestiary.models.decoder import Decoder


def _size(hidden: int, expert: int, layers: int, heads: int, *, context: int, aux: float) -> DecoderConfig:
    return DecoderConfig(
        model_type="mixtral",
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=expert,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=8, head_dim=128, scale=128**-0.5),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=1e6, rotary_dim=128),
        moe=MoE(
            num_experts=8,
            intermediate_size=expert,
            router=Router(kind=RouterKind.SOFTMAX_TOPK, top_k=2, normalize=True, weights_in_fp32=True),
        ),
        max_position_embeddings=context,
        router_aux_loss_coef=aux,
    )


class Mixtral(Decoder):
    """Mixtral mixture-of-experts decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "8x7b": _size(4096, 14336, 32, 32, context=32768, aux=0.02),
        "8x22b": _size(6144, 16384, 56, 48, context=65536, aux=0.001),
    }
