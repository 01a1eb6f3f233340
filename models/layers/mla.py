"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads out of one small latent."""

import torch
from einops import rearrange
from torch import Tensor

from bestiary.models.config import MLA, DecoderConfig, Norm
from bestiary.models.layers.attention import SelfAttention
from bestiary.models.layers.linear import Linear
from bestiary.models.layers.norm import RMSNorm
from bestiary.models.lora import adapter


class LatentAttention(SelfAttention):
    """x → latent → norm → k, v; x (→ latent → norm) → q; RoPE on a part of q, and on a part of k that heads share.

        q_b_proj(norm(q_a_proj x))                    → q: nope | rope, a head
        kv_a_proj_with_mqa x → latent | rope of k     kv_b_proj(norm latent) → nope of k | v, a head

    Without `q_lora_rank` q is `q_proj x`. The cache holds keys and values of every head: a step of decoding then
    costs what it costs elsewhere, at the price of a larger cache than the latent alone would be.

    Args:
        index, name: as for `SelfAttention`.
    """

    def _build_projections(self, config: DecoderConfig, mla: MLA | None, name: str) -> None:
        assert mla is not None
        hidden, heads, bias = config.hidden_size, config.attention.num_heads, config.attention.qkv_bias
        norm = Norm(eps=mla.norm_eps, cast=config.norm.cast, plus_one=config.norm.plus_one)

        def linear(leaf: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias, adapter(config, f"{name}.{leaf}"))

        if mla.q_lora_rank is None:
            self.q_proj = linear("q_proj", hidden, heads * config.attention.head_dim)
        else:
            self.q_a_proj = linear("q_a_proj", hidden, mla.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, norm)
            self.q_b_proj = linear("q_b_proj", mla.q_lora_rank, heads * config.attention.head_dim)
        self.kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, norm)
        self.kv_b_proj = linear("kv_b_proj", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))

    def _projected(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (B, heads, T, nope + rope), turned, and values (B, heads, T, v_head_dim)."""
        mla, heads = self.config.mla, self.config.num_heads
        assert mla is not None
        flat = self.q_proj(x) if mla.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = rearrange(flat, "b t (heads d) -> b heads t d", heads=heads)
        q_nope, q_rope = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv = rearrange(self.kv_b_proj(self.kv_a_layernorm(latent)), "b t (heads d) -> b heads t d", heads=heads)
        k_nope, v = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        q_rope, k_rope = self._turned(q_rope, k_rope[:, None], rope)
        k_rope = k_rope.expand(-1, heads, -1, -1)
        return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v
