"""Rows of an embedding, whose gradient is no second (V, H) tensor where a tied head brings a dense one of its own.

A head remembers its weight's gradient at the node where autograd collects the shares of that weight, with the number of
the backward pass. A lookup that comes later in the pass and collects at the same node adds its rows to that tensor,
which waits there until every share has come, and hands over nothing. It does so only where the one owner of the tensor
is that node. Without it (another weight, a frozen head, logits instead of a loss, another pass, a hook that keeps the
gradient) the lookup's gradient is dense, as torch's. A sparse one would not do: autograd adds it out of place.
"""

import sys
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MARK = "bestiary: dense gradients given in pass"
# What holds a gradient that only autograd's buffer owns, seen from `_waiting`: its own variable and the argument of
# getrefcount, and the tensor itself; in C++ the buffer and the Python object.
_PYTHON_OWNERS, _OWNERS = 3, 2


def lookup(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows (*ids.shape, H) of weight (V, H); those of `padding_idx` pass no gradient on."""
    if _plain(ids, weight):
        return F.embedding(ids, weight, padding_idx)
    rows: Tensor = _Lookup.apply(weight, ids, padding_idx)
    return rows


def remember_dense(ctx: Any, position: int, gradient: Tensor) -> None:
    """Say, in the backward pass of a function, that its input at `position` gets this dense gradient now."""
    node, slot = ctx.next_functions[position]
    if node is None:
        return
    current = torch._C._current_graph_task_id()
    number, given = node.metadata.get((_MARK, slot), (current, []))
    node.metadata[_MARK, slot] = (current, [*(given if number == current else ()), weakref.ref(gradient)])


def _waiting(ctx: Any) -> Tensor | None:
    """The gradient that waits where this function's first input collects, if nothing else can see it."""
    node, slot = ctx.next_functions[0]
    if node is None or torch.is_grad_enabled():
        return None
    number, given = node.metadata.get((_MARK, slot), (None, []))
    if number != torch._C._current_graph_task_id():
        return None
    alive = [tensor for tensor in (reference() for reference in given) if tensor is not None]
    if len(alive) != 1:  # more than one: some are kept elsewhere, and which one waits cannot be told
        return None
    tensor = alive.pop()
    return tensor if sys.getrefcount(tensor) == _PYTHON_OWNERS and tensor._use_count() == _OWNERS else None


def _plain(ids: Tensor, weight: Tensor) -> bool:
    """Whether torch's own backward pass is as good: on a GPU its sums have a fixed order, those of sparse rows not."""
    return (
        torch.compiler.is_compiling()
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or type(weight) not in (Tensor, torch.nn.Parameter)
        or weight.device.type != "cpu"
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.shape = padding_idx, weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,), (ids,) = gradients, ctx.saved_tensors
        waiting = _waiting(ctx)
        if waiting is None:
            padding = -1 if ctx.padding_idx is None else ctx.padding_idx
            dense = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.shape[0], padding, False)
            return dense, None, None
        ids, rows = ids.flatten(), gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]
        if ctx.padding_idx is not None:
            kept = ids != ctx.padding_idx
            ids, rows = ids[kept], rows[kept]
        waiting.index_add_(0, ids, rows.to(waiting.dtype))
        return None, None, None
