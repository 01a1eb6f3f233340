"""How the two factors of an adapter travel through the rule of the weight they adapt.

The rule says how a parameter W is made of hub tensors; then W + B A is made of the same tensors, each plus its own
product. So a rule for W is a rule for (A, B), and no family states one of its own.

    op            A (…, r, in), B (…, out, r) of ours from those of the hub
    rename        the same
    transpose     the same: PEFT keeps A on the side of the input, however the parameter is stored
    deinterleave  rows of B (or columns of A, where the axis is the input) put in blocks
    concat        A one below the other, B block-diagonal: the ranks add up
    stack         one pair per expert, stacked
    fused         none: the module in memory is one of several together, whose ranks would add up; refused by name
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bestiary.bridges.errors import InvalidRules
from bestiary.bridges.rules import Captures, Concat, Deinterleave, Expression, Hub, Rows, Stack, Transpose, fill

Read = Callable[[str], "Factors | None"]


@dataclass(frozen=True, eq=False)
class Factors:
    """A product B A added to a weight: A (…, r, in), B (…, out, r), the dots being an expert axis or nothing."""

    A: Tensor
    B: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[-2]


def tensor_in_module(expression: Expression) -> Hub | None:
    """The one float tensor that `expression` rearranges, or None if it takes several, packed ones, or a part of one.

    Modules in memory hold every parameter as one tensor, and adapters are made for modules in memory.
    """
    leaves = list(expression.leaves())
    (leaf, depth), alone = leaves[0], len(leaves) == 1
    return leaf if alone and depth == 0 and not leaf.packed and not isinstance(expression, Rows) else None


def hub_names(expression: Expression, captures: Captures, *, experts: int) -> list[str]:
    """The hub tensors of a parameter; `captures` are the numbers in its name, `experts` the rows of its stacks."""
    if isinstance(expression, Hub):
        return [fill(expression.pattern, captures)]
    numbers = [(*captures, e) for e in range(experts)] if isinstance(expression, Stack) else [captures]
    return [name for part in expression.inner for n in numbers for name in hub_names(part, n, experts=experts)]


def is_transposed(expression: Expression) -> bool:
    """Whether the hub tensor of a one-tensor expression is stored (…, in, out)."""
    below = any(is_transposed(part) for part in expression.inner)
    return below != isinstance(expression, Transpose)


def factors_from_hub(
    expression: Expression, captures: Captures, read: Read, *, experts: int, ndim: int, swapped: bool = False
) -> Factors | None:
    """The factors of a parameter from those of its hub tensors.

    Args:
        captures: the numbers in the parameter's name.
        read: the factors on one hub tensor by its name, or None where it has none.
        experts, ndim: of the parameter: length of its first axis, number of axes.
    Returns:
        None if no hub tensor has factors. Within a concat, parts without factors contribute zero.
    Raises:
        InvalidRules: the rule cuts an axis that factors do not have.
    """
    if isinstance(expression, Hub):
        return read(fill(expression.pattern, captures))

    def below(part: Expression, numbers: Captures, axes: int, turned: bool) -> Factors | None:
        return factors_from_hub(part, numbers, read, experts=experts, ndim=axes, swapped=turned)

    if isinstance(expression, Stack):
        rows = [below(expression.inner[0], (*captures, e), ndim - 1, swapped) for e in range(experts)]
        pairs = [row for row in rows if row is not None]
        if len(pairs) != len(rows):
            return None
        return Factors(torch.stack([p.A for p in pairs]), torch.stack([p.B for p in pairs]))
    if isinstance(expression, Concat) and not swapped and ndim == 2:
        return _concatenated([below(part, captures, ndim, swapped) for part in expression.inner])
    if isinstance(expression, Transpose):
        return below(expression.inner[0], captures, ndim, not swapped)
    if isinstance(expression, Deinterleave):
        found = below(expression.inner[0], captures, ndim, swapped)
        return None if found is None else _combed(found, expression, ndim, swapped, back=False)
    raise _no_factors(expression)


def factors_to_hub(expression: Expression, factors: Factors, *, swapped: bool = False) -> Factors:
    """The factors on the hub tensor of a one-tensor expression (see `tensor_in_module`) from those of the parameter.

    Raises:
        InvalidRules: the rule cuts an axis that factors do not have.
    """
    if isinstance(expression, Hub):
        return factors
    if isinstance(expression, Transpose):
        return factors_to_hub(expression.inner[0], factors, swapped=not swapped)
    if isinstance(expression, Deinterleave):
        woven = _combed(factors, expression, factors.A.dim(), swapped, back=True)
        return factors_to_hub(expression.inner[0], woven, swapped=swapped)
    raise _no_factors(expression)


def _concatenated(parts: list[Factors | None]) -> Factors | None:
    pairs = [part for part in parts if part is not None]
    if not pairs:
        return None
    rows = pairs[0].B.shape[-2]
    blocks = [part.B if part is not None else pairs[0].B.new_zeros(rows, 0) for part in parts]
    return Factors(torch.cat([pair.A for pair in pairs], dim=-2), torch.block_diag(*blocks))


def _combed(factors: Factors, op: Deinterleave, ndim: int, swapped: bool, *, back: bool) -> Factors:
    """Rows of B (or columns of A) in the order of the parameter, or with `back` in that of the hub."""
    if op.axis not in (ndim - 1, ndim - 2):
        raise _no_factors(op)
    on_output = (op.axis == ndim - 2) != swapped
    size = factors.B.shape[-2] if on_output else factors.A.shape[-1]
    order = torch.arange(size).view(-1, op.parts).T.reshape(-1)  # hub index of each element of the parameter
    order = order.argsort() if back else order
    if on_output:
        return Factors(factors.A, factors.B.index_select(-2, order.to(factors.B.device)))
    return Factors(factors.A.index_select(-1, order.to(factors.A.device)), factors.B)


def _no_factors(expression: Expression) -> InvalidRules:
    return InvalidRules(
        f"{type(expression).__name__} here cuts an axis that the factors of an adapter do not have.",
        remedy="save with merge=True, or leave this module out of the targets",
    )
