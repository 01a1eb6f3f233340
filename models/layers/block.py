"""One layer of a decoder, by where its norms stand.

pre        x + attn(norm x)              x + mlp(norm x)             Llama, Qwen, GPT-OSS
post       x + norm(attn x)              x + norm(mlp x)             OLMo 2
sandwich   x + norm(attn(norm x))        x + norm(mlp(norm x))       Gemma, GLM-4
parallel   x + attn(norm x) + mlp(norm x)                            Cohere 2
"""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.kernels.attention import MaskSpec, PieceMasks
from bestiary.models.cache import KeyValues
from bestiary.models.config import DecoderConfig, NormPlacement
from bestiary.models.layers.attention import SelfAttention
from bestiary.models.layers.mla import LatentAttention
from bestiary.models.layers.mlp import MLP
from bestiary.models.layers.moe import MoEBlock
from bestiary.models.layers.norm import RMSNorm
from bestiary.models.recomputation import Part, again


class Block(nn.Module):
    """One layer: attention and an MLP (or experts), each with its norms and residual."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        name, placement = f"model.layers.{index}", config.norm.placement
        self.rope, self.layer_type = config.rope_of(index), config.layer_types[index]
        self.residual_multiplier, self.residual_dropout = config.residual_multiplier, config.residual_dropout
        self.placement = placement
        attention = SelfAttention if config.attention.mla is None else LatentAttention
        self.self_attn = attention(config, index, f"{name}.self_attn")
        self.mlp: MLP | MoEBlock
        if config.moe is not None and config.is_moe_layer(index):
            self.mlp = MoEBlock(config, config.moe, f"{name}.mlp")
        else:
            self.mlp = MLP(config, f"{name}.mlp")
        if placement is not NormPlacement.POST:
            self.input_layernorm = RMSNorm(config.hidden_size, config.norm)
        if placement is not NormPlacement.PARALLEL:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm)
        if placement is NormPlacement.SANDWICH:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm)
        self.norms_branches = placement in (NormPlacement.POST, NormPlacement.SANDWICH)
        if self.norms_branches:
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: MaskSpec | PieceMasks,
        cache: KeyValues | None = None,
        recomputed: Part | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, H) → (B, T, H) and the router logits (B·T, E) of a routed layer.

        Args:
            recomputed: halves that the backward pass computes again; the whole block is its caller's to repeat.
        """
        selective = recomputed is Part.SELECTIVE
        if selective or recomputed is Part.ATTENTION:
            x, taken = again(self._attended, x, rope, mask, cache, keeps_attention=selective)
        else:
            x, taken = self._attended(x, rope, mask, cache)
        if selective or recomputed is Part.MLP:
            return cast(tuple[Tensor, Tensor | None], again(self._fed, x, taken))
        return self._fed(x, taken)

    def _attended(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: MaskSpec | PieceMasks,
        cache: KeyValues | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The first half; also what it took, where the second takes the same."""
        taken = self._before_attention(x)
        attended = self.self_attn(taken, rope, mask, cache)
        if self.norms_branches:
            attended = self.post_attention_layernorm(attended)
        return x + self._scaled(attended), taken if self.placement is NormPlacement.PARALLEL else None

    def _fed(self, x: Tensor, taken: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The second half, and router logits."""
        fed = self.mlp(self._before_mlp(x) if taken is None else taken)
        router_logits = None
        if isinstance(fed, tuple):
            fed, router_logits = fed
        if self.norms_branches:
            fed = self.post_feedforward_layernorm(fed)
        return x + self._scaled(fed), router_logits

    def _before_attention(self, x: Tensor) -> Tensor:
        return x if self.placement is NormPlacement.POST else cast(Tensor, self.input_layernorm(x))

    def _before_mlp(self, x: Tensor) -> Tensor:
        if self.placement is NormPlacement.POST:
            return x
        norm = self.post_attention_layernorm if self.placement is NormPlacement.PRE else self.pre_feedforward_layernorm
        return cast(Tensor, norm(x))

    def _scaled(self, out: Tensor) -> Tensor:
        """What a branch adds to the residual: dropped in part while training, then scaled."""
        if self.residual_dropout and self.training:
            out = F.dropout(out, self.residual_dropout)
        return out if self.residual_multiplier == 1.0 else out * self.residual_multiplier
