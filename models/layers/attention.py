"""Grouped-query self-attention, every variant a config field."""

import torch
from einops import rearrange
from torch import Tensor, nn

from bestiary.kernels.attention import MaskSpec, PieceMasks, attention
from bestiary.kernels.rope import apply_rope
from bestiary.models.cache import KeyValues
from bestiary.models.config import MLA, DecoderConfig, QKNormSpan, RopeLayout
from bestiary.models.layers.linear import Linear
from bestiary.models.layers.norm import RMSNorm
from bestiary.models.lora import adapter


class SelfAttention(nn.Module):
    """x → q, k, v → (norm) → RoPE → (norm) → attention → o.

    Args:
        index: layer number; it decides the window, the RoPE kind and whether there is RoPE at all.
        name: module name in the decoder, which LoRA targets are matched against.
    """

    def __init__(self, config: DecoderConfig, index: int, name: str) -> None:
        super().__init__()
        heads = config.attention
        self.config, self.index = heads, index
        rope = config.rope_of(index)
        self.interleaved = rope is not None and rope.layout is RopeLayout.INTERLEAVED
        self._build_projections(config, heads.mla, name)
        out_size = heads.num_heads * heads.v_head_dim
        self.o_proj = Linear(out_size, config.hidden_size, heads.out_bias, adapter(config, f"{name}.o_proj"))
        if heads.sinks:
            self.sinks = nn.Parameter(torch.empty(heads.num_heads))

    def _build_projections(self, config: DecoderConfig, mla: MLA | None, name: str) -> None:
        assert mla is None
        heads = config.attention
        q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, heads.qkv_bias, adapter(config, f"{name}.q_proj"))
        self.k_proj = Linear(config.hidden_size, kv_size, heads.qkv_bias, adapter(config, f"{name}.k_proj"))
        self.v_proj = Linear(config.hidden_size, kv_size, heads.qkv_bias, adapter(config, f"{name}.v_proj"))
        if heads.qk_norm is not None:
            full = heads.qk_norm.span is QKNormSpan.FULL
            self.q_norm = RMSNorm(q_size if full else heads.head_dim, config.norm)
            self.k_norm = RMSNorm(kv_size if full else heads.head_dim, config.norm)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: MaskSpec | PieceMasks,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """(B, T, H) → (B, T, H).

        Args:
            rope: cos, sin (B or 1, T, rotary_dim / 2), or None for a layer without RoPE.
            mask: what each query sees of the keys, those of the cache included.
            cache: keys and values of earlier tokens, or of the row's other slices; this call appends its own.
        """
        q, k, v = self._projected(x, rope)
        if cache is not None:
            k, v = cache.append(self.index, k, v)
        sinks = self.sinks if self.config.sinks else None
        out = attention(
            q,
            k,
            v,
            mask,
            scale=self.config.scale,
            sinks=sinks,
            softcap=self.config.logit_softcap,
            dropout=self.config.dropout if self.training else 0.0,
        )
        return self.o_proj(rearrange(out, "b heads t d -> b t (heads d)"))

    def _projected(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention takes them."""
        q, k, v = self._normed_heads(x)
        q, k = self._turned(q, k, rope)
        if self.config.qk_norm is not None and self.config.qk_norm.after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _turned(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if rope is None:
            return q, k
        return (
            apply_rope(q, *rope, interleaved=self.interleaved),
            apply_rope(k, *rope, interleaved=self.interleaved),
        )

    def _normed_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values (B, heads, T, head_dim), normalised where that comes before RoPE."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        norm, clip = self.config.qk_norm, self.config.qkv_clip
        span = None if norm is None or norm.after_rope else norm.span
        if span is QKNormSpan.FULL:
            q, k = self.q_norm(q), self.k_norm(k)
        if clip is not None:
            q, k, v = q.clamp(-clip, clip), k.clamp(-clip, clip), v.clamp(-clip, clip)
        q, k, v = (rearrange(x, "b t (heads d) -> b heads t d", d=self.config.head_dim) for x in (q, k, v))
        if span is QKNormSpan.HEAD:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
