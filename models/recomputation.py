"""Activation checkpointing: which blocks compute what again in the backward pass instead of keeping it.

    full         the whole block; one state (B, T, H) a block stays
    selective    both halves but for what attention gives: no pair of query and key is computed twice; two states stay,
                 and the output of attention with its log-sum-exp
    attention    the half with attention; what the MLP or the experts save stays
    mlp          the half with the MLP or the experts; what attention saves stays

A half is norm, sublayer and residual. Gradients are those without it, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bestiary.kernels.attention import operators
from bestiary.models.errors import InvalidConfig


class Part(StrEnum):
    """What of a block is computed again."""

    FULL = "full"
    SELECTIVE = "selective"
    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which blocks compute what again.

    Attributes:
        part: of each of them.   every: block 0 and each `every`-th behind it.   first: of the first so many; None: all.
    """

    part: Part = Part.FULL
    every: int = 1
    first: int | None = None

    def __post_init__(self) -> None:
        known = ", ".join(Part)
        if self.part not in set(Part):
            raise InvalidConfig(f"activation_checkpointing.part = {self.part!r}.", remedy=f"one of {known}")
        object.__setattr__(self, "part", Part(self.part))
        for name, count in (("every", self.every), ("first", self.first)):
            if count is not None and count < 1:
                raise InvalidConfig(f"activation_checkpointing.{name} = {count}.", remedy="at least 1, in layers")

    def of(self, index: int) -> Part | None:
        """What block `index` computes again; None: nothing."""
        chosen = index % self.every == 0 and (self.first is None or index < self.first)
        return self.part if chosen else None


def again(function: Callable[..., Any], *arguments: Any, keeps_attention: bool = False) -> Any:
    """`function(*arguments)`, called a second time in the backward pass for what that needs.

    Args:
        keeps_attention: what attention operators give is kept from the first call.
    """
    if keeps_attention:
        return checkpoint(function, *arguments, use_reentrant=False, context_fn=_keeping_attention)
    return checkpoint(function, *arguments, use_reentrant=False)


def _keeping_attention() -> Any:
    return create_selective_checkpoint_contexts(operators())
