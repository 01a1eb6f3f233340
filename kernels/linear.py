"""A linear layer, in oneDNN where that is the faster of torch's two libraries for fp32 products on CPUs.

Few rows without gradients, as in cached decoding: the BLAS packs the whole weight again at every call, which for 16
rows costs two to three times reading it; oneDNN's inner product reads the weight where it lies. Times of 16 rows of 640
through a (262144, 640) weight on two cores, against 14 ms for reading it at full speed:
    AVX-512 (Zen 5)    BLAS 92 ms, transposed 68 ms, oneDNN 31 ms
    the same, AVX2     BLAS 88 ms, transposed 66 ms, oneDNN 50 ms
Many rows, with gradients or without: `products` says where. A loop that makes many products of few rows with the same
weights has them packed once (`packed`), in bf16 as well. The two libraries add in different orders: inside
`dispatch.as_trained` few rows stay where training has them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.dispatch import apart_from_training, choose
from bestiary.kernels.packed import packed, packs
from bestiary.kernels.products import in_onednn, inner_product, mm

ROWS = 64  # more of them hide the packing

_CAPABLE = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
_NARROW = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # products of bf16, where torch takes them from oneDNN itself


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    Args:
        x: (..., in).   weight: (out, in).   bias: (out,) or None.
    Returns:
        (..., out), contiguous.
    """
    if choose("linear", {"onednn": _obstacle(x, weight, bias), "torch": None}) == "torch":
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y: Tensor = _Linear.apply(x, weight, bias)
        return y
    product: Tensor = inner_product(x, _readable(x, weight), bias, "none", [], "")
    return product


def _readable(x: Tensor, weight: Tensor) -> Tensor:
    """The weight in the layout that this product reads fastest."""
    rows = x.numel() // max(x.shape[-1], 1)
    return packed(weight, rows) if 0 < rows <= ROWS else weight


class _Linear(torch.autograd.Function):
    """Products of oneDNN, forward and backward; second-order gradients by torch."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = inner_product(x, weight, bias, "none", [], "")
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        x, weight, _ = inputs
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = upstreams
        x, weight = ctx.saved_tensors
        times = torch.mm if torch.is_grad_enabled() else mm
        rows = upstream.reshape(-1, upstream.shape[-1])
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            times(rows, weight).view(ctx.shape) if for_x else None,
            times(rows.t(), x.reshape(-1, x.shape[-1])) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _obstacle(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiler makes its own choice"
    if x.device.type != "cpu" or not _CAPABLE or inner_product is None or not torch._C._get_mkldnn_enabled():
        return "oneDNN is for x86 with AVX2, switched on in torch.backends.mkldnn"
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and packs() and _NARROW else torch.float32
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if tensor.dtype != dtype or tensor.device.type != "cpu":
            return "products of other dtypes have their own ways"
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"oneDNN takes plain tensors, not {type(tensor).__name__}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast narrows products"
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "it has no derivatives forward, and no batches of torch.func"
    if not weight.is_contiguous():
        return "it would copy a weight that is not contiguous"
    rows = x.numel() // max(x.shape[-1], 1)
    if in_onednn(rows, weight):
        return None
    if not apart_from_training() or not 0 < rows <= ROWS:
        return f"only up to {ROWS} rows without gradients is packing the weight what costs"
    return None
