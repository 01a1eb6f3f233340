"""A linear layer with a low-rank adapter (LoRA, arXiv:2106.09685), base and adapter in one autograd function."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.dispatch import choose
from bestiary.kernels.linear import linear
from bestiary.kernels.log_prob_autograd import refuse_second_order
from bestiary.kernels.packed import packs
from bestiary.kernels.products import affine, mm
from bestiary.kernels.triton_runtime import lora_obstacle


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """y = x Wᵀ + b + scaling · (dropout(x) Aᵀ) Bᵀ.

    Args:
        x: (..., in), any strides.
        weight: (out, in), and bias (out,) or None: x's dtype, as in `F.linear`. Frozen as a rule; a gradient that they
            ask for is computed.
        lora_A: (r, in), lora_B (out, r), of one dtype, which may differ from x's: the low-rank product runs in it and
            is added before the one cast back to x's dtype, as in PEFT. Where all have one dtype, the sum is made inside
            the product and rounded once.
        dropout: probability on the adapter's input while `training`; only the reference has it.
    Returns:
        (..., out) in x's dtype, contiguous; under autocast everything has autocast's dtype, as in `F.linear`.
    Raises:
        UnsupportedDispatch: second-order gradients, which `force(lora_linear="reference")` gives.
    Cost, of N rows:
        Forward 2·N·(in·out + r·(in + out)) FLOPs, and no buffer of (N, out) but the result. Backward with a frozen base
        2·N·in·out for x, unless it is frozen too, and 4·N·r·(in + out). Saved: x and the parameters, which are there
        anyway, and x Aᵀ (N, r): r/in of x, cheaper to keep than to read x once more. With A frozen x is not saved.
    """
    given = (x, weight, bias, lora_A, lora_B)
    if _under_autocast(x):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight, lora_A, lora_B = (_autocast(tensor, narrow) for tensor in (x, weight, lora_A, lora_B))
        bias = None if bias is None else _autocast(bias, narrow)
        with torch.autocast(x.device.type, enabled=False):
            return lora_linear(x, weight, bias, lora_A, lora_B, scaling, dropout=dropout, training=training)
    dropped = f"dropout = {dropout} draws a mask for the adapter's input" if dropout and training else None
    obstacles = {"triton": dropped or lora_obstacle(*given), "fused": dropped or _obstacle(*given), "reference": None}
    implementation = choose("lora_linear", obstacles)
    if implementation == "reference":
        return reference(*given, scaling, dropout=dropout, training=training)
    triton = implementation == "triton"
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        result: Tensor = _LoRALinear.apply(*given, scaling, triton)
        return result
    return _product(x, weight, bias, F.linear(x.to(lora_A.dtype), lora_A), lora_B, scaling, triton)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """`lora_linear` by plain torch operations: any dtype and device, any order of gradients, any kind of tensor."""
    y = F.linear(x, weight, bias)
    low = F.linear(F.dropout(x, dropout, training).to(lora_A.dtype), lora_A)
    return (y + F.linear(low, lora_B) * scaling).to(y.dtype)


def _obstacle(*tensors: Tensor | None) -> str | None:
    """Why base and adapter cannot run as one function; None: they can."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"sums in place take plain tensors, not {type(tensor).__name__}"
    return None


def _under_autocast(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)  # meta tensors have no autocast


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does in front of a product: every float but float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _rows(x: Tensor) -> Tensor:
    """(..., d) → (N, d), a view where strides allow."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, high: Tensor, scaling: float, triton: bool
) -> Tensor:
    """x Wᵀ + b + scaling · low Hᵀ for x (..., in), weight (out, in), low (..., r), high (out, r)."""
    if triton:
        from bestiary.kernels.triton_lora_linear import product  # needs the optional triton

        return product(x, weight, bias, low, high, scaling)
    y = linear(x, weight, bias) if packs() else affine(x, weight, bias)
    if low.dtype == y.dtype:
        low = _rows(low)
        y.view(low.shape[0], y.shape[-1]).addmm_(low, high.t(), alpha=scaling)
        return y
    return y.add_(F.linear(low, high).mul_(scaling))  # added in the wider dtype, then rounded once


class _LoRALinear(torch.autograd.Function):
    """Saves x, the parameters and x Aᵀ, each only where a wanted gradient reads it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_A: Tensor,
        lora_B: Tensor,
        scaling: float,
        triton: bool,
    ) -> Tensor:
        low = F.linear(x.to(lora_A.dtype), lora_A)
        for_x, for_weight, _, for_A, for_B = ctx.needs_input_grad[:5]
        ctx.save_for_backward(
            x if for_weight or for_A else None,
            weight if for_x else None,
            lora_A if for_x else None,
            lora_B if for_x or for_A else None,
            low if for_B else None,
        )
        ctx.scaling, ctx.triton, ctx.shape, ctx.dtype = scaling, triton, x.shape, lora_A.dtype
        return _product(x, weight, bias, low, lora_B, scaling, triton)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("lora_linear", "triton" if ctx.triton else "fused")
        if not _under_autocast(upstream):
            return *_gradients(ctx, _rows(upstream)), None, None
        with torch.autocast(upstream.device.type, enabled=False):
            return *_gradients(ctx, _rows(upstream)), None, None


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, lora_A, lora_B, from upstream (N, out)."""
    for_x, for_weight, for_bias, for_A, for_B = ctx.needs_input_grad[:5]
    x, weight, lora_A, lora_B, low = ctx.saved_tensors
    of_x = of_weight = of_bias = of_A = of_B = None
    wide = upstream.to(ctx.dtype)
    if for_B:
        of_B = (wide.t() @ _rows(low)).mul_(ctx.scaling)
    if for_x or for_A:
        back = (wide @ lora_B).mul_(ctx.scaling)  # (N, r)
    del wide
    if for_A or for_weight:
        x = _rows(x)
    if for_A:
        of_A = back.t() @ x.to(ctx.dtype)
    if for_weight:
        of_weight = mm(upstream.t(), x)
    if for_bias:
        of_bias = upstream.sum(0)
    if for_x:
        of_x = _product(upstream, weight.t(), None, back, lora_A.t(), 1.0, ctx.triton).view(ctx.shape)
    return of_x, of_weight, of_bias, of_A, of_B
