"""Experts that stay in bfloat16 in memory: run in float32 some experts at a time, by the module's own forward.

A layer of 128 experts of GPT-OSS 120B is 6.4 GB in bfloat16 and 12.7 in float32. The module that holds them, Hugging
Face's or ours, runs on a copy of itself with a slice of every parameter, on the pairs of a token and one of its experts
that the slice serves; the slices' outputs are summed. Every number is that of the float32 module, but for the order in
which a token's experts are added up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SLICE_BYTES = 2**31
"""Of the float32 weights of a slice."""


def are_experts(module: nn.Module) -> bool:
    """Whether a module's own parameters are stacks over experts: as long as each other, matrices among them."""
    own = list(module.parameters(recurse=False))
    return any(p.ndim == 3 for p in own) and len({p.shape[0] for p in own if p.ndim}) == 1


@contextmanager
def sliced(module: nn.Module) -> Iterator[None]:
    """Within the block the forward of a module of experts, (x, indices, weights) → (N, H), runs slice by slice."""
    object.__setattr__(module, "forward", _Sliced(module))
    try:
        yield
    finally:
        object.__delattr__(module, "forward")


class _Sliced:
    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        own = list(module.parameters(recurse=False))
        self._count = own[0].shape[0]
        wide = 4 * sum(parameter[0].numel() for parameter in own)
        self._size = max(1, SLICE_BYTES // wide)

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """x (N, H), indices and weights (N, K) → (N, H) in the dtype of x."""
        total = torch.zeros_like(x)
        for start in range(0, self._count, self._size):
            stop = min(start + self._size, self._count)
            rows, slots = ((indices >= start) & (indices < stop)).nonzero(as_tuple=True)
            if not len(rows):
                continue
            chosen, weight = indices[rows, slots, None] - start, weights[rows, slots, None]
            total.index_add_(0, rows, self._part(start, stop, x.dtype)(x[rows], chosen, weight))
        return total

    def _part(self, start: int, stop: int, dtype: torch.dtype) -> Any:
        """The module with the experts from `start` to `stop`, in `dtype`; nothing is shared that it could write to."""
        part = copy.copy(self._module)
        del part.__dict__["forward"]
        part._parameters = {
            name: None if parameter is None else nn.Parameter(parameter[start:stop].to(dtype), requires_grad=False)
            for name, parameter in self._module._parameters.items()
        }
        if "num_experts" in part.__dict__:
            part.num_experts = stop - start
        return part
