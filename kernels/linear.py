"""A linear layer; few rows without gradients, as in cached decoding, run in oneDNN.

torch gives fp32 products on a CPU to its BLAS, which packs the whole weight again at every call: for 16 rows that costs
two to three times reading it. oneDNN's inner product reads the weight where it lies, in the widest instructions of the
processor whoever made it. Times of 16 rows of 640 through a (262144, 640) weight on two cores, against 14 ms for
reading it at full speed:
    AVX-512 (Zen 5)    BLAS 92 ms, transposed 68 ms, oneDNN 31 ms
    the same, AVX2     BLAS 88 ms, transposed 66 ms, oneDNN 50 ms
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.dispatch import choose

# Many rows hide the packing. Training and prefill stay with the BLAS, so that a forward pass has the same bits with and
# without gradients.
ROWS = 64

_inner_product: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_CAPABLE = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    Args:
        x: (..., in).   weight: (out, in).   bias: (out,) or None.
    Returns:
        (..., out), contiguous.
    """
    if choose("linear", {"onednn": _obstacle(x, weight, bias), "torch": None}) == "torch":
        return F.linear(x, weight, bias)
    product: Tensor = _inner_product(x, weight, bias, "none", [], "")
    return product


def _obstacle(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return "it has no gradients, and a compiler makes its own choice"
    if x.device.type != "cpu" or not _CAPABLE or _inner_product is None or not torch._C._get_mkldnn_enabled():
        return "oneDNN is for x86 with AVX2, switched on in torch.backends.mkldnn"
    if not 0 < x.numel() <= ROWS * x.shape[-1]:
        return f"only up to {ROWS} rows is packing the weight what costs"
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return "products of other dtypes have their own ways"
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"oneDNN takes plain tensors, not {type(tensor).__name__}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast narrows products"
    return None if weight.is_contiguous() else "it would copy a weight that is not contiguous"
