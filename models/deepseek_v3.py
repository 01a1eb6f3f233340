"""DeepSeek-V3 and R1, after transformers' DeepseekV3ForCausalLM (arXiv:2412.19437).

    x ─┬─ norm ─ latent attention ─ o ─ + ─┬─ norm ─┬─ router ─ top-k experts ─ Σ ─ + ─ + ─
       └───────────────────────────────────┘        └─ shared expert ───────────────┘   │
                                           └────────────────────────────────────────────┘
    latent attention (`models/layers/mla.py`)
        x ─ q_a ─ norm ─ q_b ─ q: 128 stand, 64 turn, a head
        x ─ kv_a ─┬─ norm ─ kv_b ─ k: 128 stand, a head, and v: 128
                  └─ k: 64 turn, one for all heads

Numeric contract            runs in
    RMSNorm                 fp32, cast, then × w; those of the latents with eps 1e-6 whatever the config says
    RoPE (YaRN)             pairs (2i, 2i + 1); mscale enters the softmax scale, squared, and not cos and sin
    softmax                 fp32
    router                  fp32 throughout: sigmoid; with the correction bias it chooses groups by their two best and
                            experts in them, without it weighs them; renormalised, scaled, kept in fp32
    correction bias         fp32 whatever the model's dtype, trained by its own rule and not by gradients
    experts                 model dtype; the product with an fp32 weight in fp32, cast before the sum

The first `first_k_dense_replace` layers have the dense MLP. The layer for multi-token prediction, which checkpoints
count on behind the last one, is left out as in transformers.
"""

from math import log
from typing import ClassVar

from bestiary.models.config import (
    MLA,
    Attention,
    DecoderConfig,
    MoE,
    Norm,
    Rope,
    RopeLayout,
    Router,
    RouterKind,
    SharedExpert,
    YarnScaling,
)
from bestiary.models.decoder import Decoder

_MLA = MLA(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, norm_eps=1e-6)


class DeepseekV3(Decoder):
    """DeepSeek-V3 decoder; see the module docstring for its block and numeric contract."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {
        "671b": DecoderConfig(
            model_type="deepseek_v3",
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            attention=Attention(
                num_heads=128,
                num_kv_heads=128,
                head_dim=192,
                scale=192**-0.5 * (0.1 * log(40) + 1) ** 2,
                mla=_MLA,
            ),
            norm=Norm(eps=1e-6),
            rope=Rope(
                theta=10000.0,
                rotary_dim=64,
                layout=RopeLayout.INTERLEAVED,
                scaling=YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
            ),
            moe=MoE(
                num_experts=256,
                intermediate_size=2048,
                router=Router(
                    kind=RouterKind.SIGMOID,
                    top_k=8,
                    normalize=True,
                    num_groups=8,
                    topk_groups=4,
                    scale=2.5,
                    weights_in_fp32=True,
                ),
                shared=SharedExpert(intermediate_size=2048),
            ),
            dense_layers=(0, 1, 2),
            max_position_embeddings=163840,
        ),
    }
