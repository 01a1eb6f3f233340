"""OLMoE, after transformers' OlmoeForCausalLM (arXiv:2409.02060).

    x ─┬─ norm ─ q,k,v ─ q/k-norm ─ clip ─ RoPE ─ attention ─ o ─ + ─┬─ norm ─ router ─ top-k experts ─ Σ ─ + ─
       └─────────────────────────────────────────────────────────────┘└─────────────────────────────────────┘

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w
    q/k-norm                the same, over all heads together
    softmax                 fp32
    router                  logits in model dtype, softmax over all experts fp32, top-k, cast back; not renormalised
    experts                 model dtype, weighted sum in model dtype

Every layer routes. The clip of q, k and v is off in the published models.
"""

from typing import ClassVar

from bestiary.models.config import (
    Attention,
    DecoderConfig,
    MoE,
    Norm,
    QKNorm,
    QKNormSpan,
    Rope,
    Router,
    RouterKind,
)
from bestiary.models.decoder import Decoder


class Olmoe(Decoder):
    """OLMoE mixture-of-experts decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "1b-7b": DecoderConfig(
            model_type="olmoe",
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=1024,
            num_hidden_layers=16,
            attention=Attention(
                num_heads=16,
                num_kv_heads=16,
                head_dim=128,
                scale=128**-0.5,
                qk_norm=QKNorm(span=QKNormSpan.FULL),
            ),
            norm=Norm(eps=1e-5),
            rope=Rope(theta=10000.0, rotary_dim=128),
            moe=MoE(
                num_experts=64,
                intermediate_size=1024,
                router=Router(kind=RouterKind.SOFTMAX_TOPK, top_k=8),
            ),
            max_position_embeddings=4096,
            router_aux_loss_coef=0.01,
            padding_idx=1,
        ),
    }
