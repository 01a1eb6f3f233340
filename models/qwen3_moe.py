"""Qwen3-MoE, after transformers' Qwen3MoeForCausalLM (arXiv:2505.09388).

    x ─┬─ norm ─ q,k,v ─ q/k-norm ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ router ─ top-k experts ─ Σ ─ + ─
       └──────────────────────────────────────────────────────┘└──────────────────────────────────────┘

Numeric contract            runs in
    RMSNorm, q/k-norm       fp32, cast, then × w
    softmax                 fp32
    router                  logits in model dtype, softmax over all experts fp32, top-k, renormalised, cast back
    experts                 model dtype, weighted sum in model dtype

No shared expert, no router bias. A layer in `dense_layers` has the dense MLP.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, MoE, Norm, QKNorm, Rope, Router, RouterKind
from bestiary.models.decoder import Decoder


def _size(
    hidden: int, mlp: int, expert: int, layers: int, heads: int, *, theta: float = 1e6, context: int = 40960
) -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=4, head_dim=128, scale=128**-0.5, qk_norm=QKNorm()),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=theta, rotary_dim=128),
        moe=MoE(
            num_experts=128,
            intermediate_size=expert,
            router=Router(kind=RouterKind.SOFTMAX_TOPK, top_k=8, normalize=True),
        ),
        max_position_embeddings=context,
        router_aux_loss_coef=0.001,
    )


class Qwen3MoE(Decoder):
    """Qwen3 mixture-of-experts decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "30b-a3b": _size(2048, 6144, 768, 48, 32),
        "30b-a3b-2507": _size(2048, 6144, 768, 48, 32, theta=1e7, context=262144),
        "235b-a22b": _size(4096, 12288, 1536, 94, 64),
    }
