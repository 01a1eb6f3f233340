"""GLM-4.5 and GLM-4.6, after transformers' Glm4MoeForCausalLM (arXiv:2508.06471).

    x ─┬─ norm ─ q,k,v + bias ─ q/k-norm ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─┬─ router ─ top-k experts ─ Σ ─ + ─ + ─
       └─────────────────────────────────────────────────────────────┘        └─ shared expert ───────────────┘   │
                                                                     └────────────────────────────────────────────┘

Numeric contract            runs in
    RMSNorm, q/k-norm       fp32, cast, then × w
    RoPE                    the first half of each head
    softmax                 fp32
    router                  fp32 throughout: sigmoid; with the correction bias it chooses groups and experts, without
                            it weighs them; renormalised, scaled, kept in fp32
    correction bias         fp32 whatever the model's dtype, trained by its own rule and not by gradients
    experts                 model dtype; the product with an fp32 weight in fp32, cast before the sum

The first `first_k_dense_replace` layers have the dense MLP. A layer for multi-token prediction, which checkpoints
count on behind the last one, is left out as in transformers.
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    MoE,
    Norm,
    QKNorm,
    Rope,
    Router,
    RouterKind,
    SharedExpert,
)
from bestiary.models.decoder import Decoder


def _size(
    hidden: int, mlp: int, expert: int, layers: int, dense: int, experts: int, *, qk_norm: bool, scale: float
) -> DecoderConfig:
    return DecoderConfig(
        model_type="glm4_moe",
        vocab_size=151552,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(
            num_heads=96,
            num_kv_heads=8,
            head_dim=128,
            scale=128**-0.5,
            qkv_bias=True,
            qk_norm=QKNorm() if qk_norm else None,
        ),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=1e6, rotary_dim=64),
        moe=MoE(
            num_experts=experts,
            intermediate_size=expert,
            router=Router(kind=RouterKind.SIGMOID, top_k=8, normalize=True, scale=scale, weights_in_fp32=True),
            shared=SharedExpert(intermediate_size=expert),
        ),
        dense_layers=tuple(range(dense)),
        padding_idx=151329,
        max_position_embeddings=131072,
    )


class Glm4MoE(Decoder):
    """GLM-4.5 mixture-of-experts decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "4.5": _size(5120, 12288, 1536, 92, 3, 160, qk_norm=True, scale=2.5),
        "4.5-air": _size(4096, 10944, 1408, 46, 1, 128, qk_norm=False, scale=1.0),
    }
