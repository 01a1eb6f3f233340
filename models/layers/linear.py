"""A Linear that has LoRA built in."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.models.config import LoRAConfig
from bestiary.models.errors import InvalidConfig


class Linear(nn.Linear):
    """y = x Wᵀ + b (+ dropout(x) Aᵀ Bᵀ · scaling with LoRA; nothing of it exists without).

    Args:
        lora: the adapter of this layer, or None.

    Shapes: weight (out, in), bias (out,), lora_A (r, in), lora_B (out, r).
    It subclasses `nn.Linear`, so that PEFT can wrap it; both adapters on one layer is an error.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, lora: LoRAConfig | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.lora = lora
        if lora is not None:
            self.lora_A = nn.Parameter(torch.empty(lora.r, in_features))
            self.lora_B = nn.Parameter(torch.empty(out_features, lora.r))
            reset_adapter(self.lora_A, self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out)."""
        y = F.linear(x, self.weight, self.bias)
        if self.lora is None:
            return y
        low = F.linear(F.dropout(x, self.lora.dropout, self.training).to(self.lora_A.dtype), self.lora_A)
        return y + (F.linear(low, self.lora_B) * self.lora.scaling).to(y.dtype)

    def merged_weight(self) -> Tensor:
        """(out, in), W + B A · scaling, computed out of place in at least fp32 and cast back once."""
        return (
            self.weight if self.lora is None else merge_delta(self.weight, self.lora_A, self.lora_B, self.lora.scaling)
        )

    def merge(self) -> None:
        """Fold the adapter into the weight and drop it. One-way: the base is not recoverable."""
        if self.lora is None:
            raise InvalidConfig("merge() on a layer without LoRA.", remedy="merge once; the adapter is gone afterwards")
        with torch.no_grad():
            self.weight.copy_(self.merged_weight())
        del self.lora_A, self.lora_B
        self.lora = None


def merge_delta(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """W + B A · scaling, out of place, in at least fp32, cast to W's dtype. Batched over leading dimensions."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(dtype) + lora_B.to(dtype) @ lora_A.to(dtype) * scaling).to(weight.dtype)


def reset_adapter(lora_A: Tensor, lora_B: Tensor, generator: torch.Generator | None = None) -> None:
    """A uniform in ±√(1 / in) (Kaiming with a = √5, as PEFT), B zero: the adapted layer starts as the base layer."""
    with torch.no_grad():
        bound = math.sqrt(1 / lora_A.shape[-1])
        lora_A.uniform_(-bound, bound, generator=generator)
        lora_B.zero_()
