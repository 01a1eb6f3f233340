"""Products of fp32 matrices on processors whose widest instructions torch's BLAS leaves unused.

MKL keeps to AVX2 on processors that are not Intel's. oneDNN, the other library inside torch, does not ask who made
them. Two cores of a Zen 5, GFLOP/s of (1024, 640) · (640, 4096), forward, dX, dW: MKL 204, 216, 216; oneDNN 474, 472,
394. Both add in fp32, in different orders. Everywhere else, and for small matrices, these are `torch.mm`.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.flops import when_counted

SMALL = 2**22  # multiply-adds below which calling costs more than it saves

inner_product: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _multiply_adds(x: Sequence[int], weight: Sequence[int], *_: object, out_shape: object = None, **__: object) -> int:
    """What torch counts for `F.linear` of the same shapes, which knows no formula for oneDNN's."""
    return 2 * prod(x) * weight[0]


def _multiply_adds_in_place(_: object, left: Sequence[int], right: Sequence[int], **__: object) -> int:
    """What torch counts for `addmm`."""
    return 2 * prod(left) * right[1]


def _register(counter: Any) -> None:
    if inner_product is not None:
        counter.register_flop_formula(inner_product)(_multiply_adds)
    if torch.ops.aten.addmm_ not in counter.flop_registry:  # torch 2.13 counts `addmm` alone
        counter.register_flop_formula(torch.ops.aten.addmm_)(_multiply_adds_in_place)


when_counted(_register)


@cache
def blas_is_held_back() -> bool:
    """Whether this processor has AVX-512 that MKL does not use, and oneDNN is there to use it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or inner_product is None:
        return False
    information = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and information.exists() and "GenuineIntel" not in information.read_text()


def in_onednn(rows: int, *tensors: Tensor) -> bool:
    """Whether a product of `rows` rows with (out, in) matrices, all of them in `tensors`, belongs to oneDNN here."""
    if torch.compiler.is_compiling() or not blas_is_held_back() or not torch._C._get_mkldnn_enabled():
        return False
    plain = all(
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and 1 in tensor.stride()[-2:]
        for tensor in tensors
    )
    return plain and rows * tensors[-1].numel() >= SMALL


def mm(left: Tensor, right: Tensor) -> Tensor:
    """left (n, k) · right (k, m), without a graph."""
    if not in_onednn(len(left), left, right):
        return torch.mm(left, right)
    product: Tensor = inner_product(left, right.t(), None, "none", [], "")
    return product


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b for x (..., in) and weight (out, in), without a graph."""
    if not in_onednn(x.numel() // max(x.shape[-1], 1), x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = inner_product(x, weight, bias, "none", [], "")
    return y


def put_product(out: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """out = left · right, or out += left · right, without a graph."""
    if in_onednn(len(left), left, right):
        product = mm(left, right)
        out.add_(product) if add else out.copy_(product)
    elif add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)
