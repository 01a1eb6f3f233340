"""Benign rewrites of norms and of the residual stream: the same sums in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.models.config import NormPlacement


def torch_norm(_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By torch's own functions."""

    def norm(
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        plus_one: bool = False,
        scale_then_cast: bool = False,
        centred: bool = False,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 + weight.to(wide) if plus_one else weight.to(wide)
        normalise = F.layer_norm if centred else F.rms_norm
        normed = normalise(x.to(wide), (x.shape[-1],), eps=eps)
        return (normed * scale).to(x.dtype) if scale_then_cast else normed.to(x.dtype) * scale.to(x.dtype)

    return norm


def divided_norm(_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Division by the root of a scalar product, the weight first."""

    def norm(
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        plus_one: bool = False,
        scale_then_cast: bool = False,
        centred: bool = False,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide - wide.mean(-1, keepdim=True) if centred else wide
        scale = 1.0 + weight.to(wide.dtype) if plus_one else weight
        squares = torch.einsum("...d,...d->...", wide, wide)[..., None]
        return (wide * scale / torch.sqrt(squares / x.shape[-1] + eps)).to(x.dtype)

    return norm


def residual_last(_forward: Callable[..., Any]) -> Callable[..., Any]:
    """branch + x instead of x + branch."""

    def forward(self: Any, x: Tensor, rope: Any, mask: Any, cache: Any = None) -> tuple[Tensor, Tensor | None]:
        taken = self._before_attention(x)
        attended = self.self_attn(taken, rope, mask, cache)
        if self.norms_branches:
            attended = self.post_attention_layernorm(attended)
        x = self._scaled(attended) + x
        fed, router_logits = self.mlp(taken if self.placement is NormPlacement.PARALLEL else self._before_mlp(x)), None
        if isinstance(fed, tuple):
            fed, router_logits = fed
        if self.norms_branches:
            fed = self.post_feedforward_layernorm(fed)
        return self._scaled(fed) + x, router_logits

    return forward
