"""Qwen2-MoE, after transformers' Qwen2MoeForCausalLM (arXiv:2407.10671).

    x ─┬─ norm ─ q,k,v + bias ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─┬─ router ─ top-k experts ─ Σ ─ + ─ + ─
       └──────────────────────────────────────────────────┘        └─ σ(gate) · shared expert ─────┘   │
                                                          └────────────────────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    softmax                 fp32
    router                  logits in model dtype, softmax over all experts fp32, top-k, cast back; not renormalised
    experts                 model dtype, weighted sum in model dtype
    shared expert           model dtype, times the sigmoid of one logit a token

A layer in `dense_layers` has the dense MLP. Windows, where the config switches them on, hold in every other of the
lower layers.
"""

from typing import ClassVar

from bestiary.models.config import Attention, DecoderConfig, MoE, Norm, Rope, Router, RouterKind, SharedExpert
from bestiary.models.decoder import Decoder


def _size(
    hidden: int, mlp: int, expert: int, shared: int, layers: int, heads: int, kv: int, experts: int, top_k: int,
    *, theta: float, context: int,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        model_type="qwen2_moe",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attention=Attention(num_heads=heads, num_kv_heads=kv, head_dim=128, scale=128**-0.5, qkv_bias=True),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=theta, rotary_dim=128),
        moe=MoE(
            num_experts=experts,
            intermediate_size=expert,
            router=Router(kind=RouterKind.SOFTMAX_TOPK, top_k=top_k),
            shared=SharedExpert(intermediate_size=shared, gated=True),
        ),
        max_position_embeddings=context,
        router_aux_loss_coef=0.001,
    )


class Qwen2MoE(Decoder):
    """Qwen2 mixture-of-experts decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "qwen1.5-a2.7b": _size(2048, 5632, 1408, 5632, 24, 16, 16, 60, 4, theta=1e6, context=8192),
        "57b-a14b": _size(3584, 18944, 2560, 20480, 28, 28, 4, 64, 8, theta=1e6, context=131072),
    }
