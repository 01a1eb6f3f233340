"""Logits of a linear head whose vocabulary is computed in multiples of 64 and never shows it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.linear import ROWS, linear
from bestiary.kernels.products import put_product

TILE = 64


def head_logits(hidden: Tensor, weight: Tensor, *, divisor: float = 1.0, softcap: float | None = None) -> Tensor:
    """softcap(hidden Wᵀ / divisor) over the real vocabulary.

    The last V mod 64 rows of the weight go through one zero-padded tile of 64 rows, so that every GEMM is aligned; the
    padded columns are cut before anything sees them, and their gradient never exists.

    Args:
        hidden: (..., H).   weight: (V, H).
        divisor: Granite's `logits_scaling`.   softcap: cap · tanh(z / cap), in the logits' dtype (Gemma).
    Returns:
        (..., V), contiguous, in the dtype of the product.
    """
    logits = _TiledLinear.apply(hidden, weight) if weight.shape[0] % TILE else linear(hidden, weight)
    if divisor != 1.0:
        logits = logits / divisor
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


class _TiledLinear(torch.autograd.Function):
    """hidden Wᵀ with the ragged rows of W in a tile; its gradients are those of one product.

    Autograd through the slices would fill and add two more gradients of the size of W
    (1.1 to 1.6 × the time of the backward pass, measured by `bestiary.tools.bench.head`).
    """

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        ragged = weight.shape[0] % TILE
        whole = weight.shape[0] - ragged
        tile = linear(hidden, F.pad(weight[whole:], (0, 0, 0, TILE - ragged)))[..., :ragged]
        if not _in_place(hidden, weight):
            return torch.cat((linear(hidden, weight[:whole]), tile), dim=-1)
        logits = hidden.new_empty((*hidden.shape[:-1], weight.shape[0]))
        columns = logits.view(-1, weight.shape[0])[:, :whole]
        put_product(columns, hidden.reshape(-1, hidden.shape[-1]), weight[:whole].t())
        logits[..., whole:] = tile
        return logits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,) = gradients
        hidden, weight = ctx.saved_tensors
        for_hidden = for_weight = None
        if ctx.needs_input_grad[0]:
            for_hidden = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype)  # they differ under autocast
        if ctx.needs_input_grad[1]:
            rows, columns = hidden.reshape(-1, hidden.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            for_weight = (columns.t() @ rows.to(gradient.dtype)).to(weight.dtype)
        return for_hidden, for_weight


def _in_place(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the product goes straight into its columns of the logits, which saves a pass over all of them.

    Not on accelerators: rows that do not start at multiples of 16 bytes are what the tile is there to avoid.
    """
    return (
        hidden.device.type == "cpu"
        and hidden.numel() > ROWS * hidden.shape[-1]  # fewer rows have a faster product of their own
        and hidden.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )
