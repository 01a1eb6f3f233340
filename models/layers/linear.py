"""A Linear that has LoRA built in."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from bestiary.kernels.linear import linear
from bestiary.kernels.lora_linear import lora_linear
from bestiary.models.config import LoRAConfig
from bestiary.models.lora import Adaptable, LowRank, Site, new_adapter


def is_bare(module: nn.Module) -> bool:
    """Whether calling `module` computes x Wᵀ + b and nobody else sees it: no adapter, hook or wrapper.

    False while a graph is traced: the compiler sees through calls itself.
    """
    if torch.compiler.is_compiling() or type(module) is not Linear or module.lora is not None:
        return False
    seen = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )
    return not seen and "forward" not in module.__dict__ and module._compiled_call_impl is None


class Linear(nn.Linear, Adaptable):
    """y = x Wᵀ + b (+ dropout(x) Aᵀ Bᵀ · scaling with LoRA; nothing of it exists without).

    Args:
        lora: the adapter of this layer, or None.

    Shapes: weight (out, in), bias (out,), lora_A (r, in), lora_B (out, r).
    With LoRA it runs as `kernels.lora_linear`: the low-rank product in the adapter's dtype, added before the one cast
    back, as in PEFT. It subclasses `nn.Linear`, so that PEFT can wrap it; both adapters on one layer is an error.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, lora: LoRAConfig | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.lora = lora
        if lora is not None:
            self.lora_A, self.lora_B = new_adapter(self.weight, lora)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        if self.lora is None:
            return linear(x, self.weight, self.bias)
        return lora_linear(
            x,
            self.weight,
            self.bias,
            self.lora_A,
            self.lora_B,
            self.scaling(self.lora),
            dropout=self.lora.dropout,
            training=self.training,
        )

    def sites(self, name: str) -> Iterator[Site]:
        """The weight."""
        low_rank = None if self.lora is None else LowRank(self.lora_A, self.lora_B, self.lora)
        yield Site(name, f"{name}.weight", cast(nn.Parameter, self.weight), low_rank)

    def drop_adapters(self) -> None:
        """Be a plain linear layer again."""
        if self.lora is not None:
            del self.lora_A, self.lora_B
            self.lora = None
