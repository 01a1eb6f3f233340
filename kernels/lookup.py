"""Rows of an embedding, whose gradient is no second (V, H) tensor where a tied head brings a dense one of its own.

A head marks the node at which its weight's gradient is collected with the number of the backward pass. A lookup that
comes later in the same pass and collects at the same node hands over only its rows, as a sparse tensor: what autograd
adds there is dense and the sum is, in place where nothing else holds it. Without the mark (another weight, a frozen
head, logits instead of a loss, another pass) the gradient is dense, as torch's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MARK = "bestiary: a dense gradient was given in pass"


def lookup(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows (*ids.shape, H) of weight (V, H); those of `padding_idx` pass no gradient on."""
    if _plain(ids, weight):
        return F.embedding(ids, weight, padding_idx)
    rows: Tensor = _Lookup.apply(weight, ids, padding_idx)
    return rows


def mark_dense(ctx: Any, position: int) -> None:
    """Say, in the backward pass of a function, that its input at `position` gets a dense gradient now."""
    node, slot = ctx.next_functions[position]
    if node is not None:
        node.metadata[_MARK, slot] = torch._C._current_graph_task_id()


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
        node, slot = ctx.next_functions[0]
        given = node is not None and node.metadata.get((_MARK, slot)) == torch._C._current_graph_task_id()
        if torch.is_grad_enabled() or not given:
            padding = -1 if ctx.padding_idx is None else ctx.padding_idx
            dense = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.shape[0], padding, False)
            return dense, None, None
        ids, rows = ids.flatten(), gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]
        if ctx.padding_idx is not None:
            kept = ids != ctx.padding_idx
            ids, rows = ids[kept], rows[kept]
        return torch.sparse_coo_tensor(ids[None], rows, ctx.shape, check_invariants=False), None, None
