"""Norms and activations that keep nothing but their inputs for the backward pass and recompute the rest.

Plain autograd also keeps the normalised rows of an RMSNorm and the activated gate of an MLP. The forward results are
those of the plain expressions, bit for bit; second derivatives are not offered.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.kernels.precision import at_least_fp32


def obstacle(*tensors: Tensor) -> str | None:
    """Why the recomputing form is not used, for `dispatch.choose`; None: it is."""
    if torch.compiler.is_compiling():
        return "the compiler decides itself what to keep"
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return "no gradient is asked for"
    return None


class LeanRMSNorm(torch.autograd.Function):
    """`bestiary.kernels.norm.rms_norm`, keeping x, the weight and one reciprocal root a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool, scale_then_cast: bool) -> Tensor:
        """(..., d) → (..., d) in x's dtype."""
        wide = x.to(at_least_fp32(x.dtype))
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, root)
        ctx.plus_one, ctx.scale_then_cast = plus_one, scale_then_cast
        normed = wide * root
        scale = 1.0 + weight.to(wide.dtype) if plus_one else weight
        if scale_then_cast and scale.dtype == wide.dtype:
            return normed.mul_(scale).to(x.dtype)
        if scale_then_cast:
            return (scale * normed).to(x.dtype)
        return (scale * normed.to(x.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and the weight, summed in at least fp32."""
        x, weight, root = ctx.saved_tensors
        normed = x.to(root.dtype) * root
        upstream = gradients[0].to(root.dtype)
        for_x = for_weight = None
        if ctx.needs_input_grad[1]:
            seen = normed if ctx.scale_then_cast else normed.to(x.dtype).to(root.dtype)
            for_weight = (upstream * seen).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scale = weight.to(root.dtype)
            scaled = upstream * (1.0 + scale if ctx.plus_one else scale)
            inner = (scaled * normed).mean(-1, keepdim=True)
            for_x = scaled.sub_(normed.mul_(inner)).mul_(root).to(x.dtype)
        return for_x, for_weight, None, None, None


class LeanGated(torch.autograd.Function):
    """`bestiary.kernels.activation.gated`, keeping gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) · up."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activate(gate, activation) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of gate and up."""
        (upstream,) = gradients
        gate, up = ctx.saved_tensors
        for_gate = for_up = None
        if ctx.needs_input_grad[1]:
            for_up = activate(gate, ctx.activation) * upstream
        if ctx.needs_input_grad[0]:
            for_gate = activate_back(upstream * up, gate, ctx.activation)
        return for_gate, for_up, None


def activate(gate: Tensor, activation: str) -> Tensor:
    """The gate activation alone: silu, gelu, gelu_pytorch_tanh, relu or relu2."""
    if activation == "silu":
        return F.silu(gate)
    if activation in {"relu", "relu2"}:
        return F.relu(gate) if activation == "relu" else F.relu(gate).square()
    return F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")


def activate_back(pull: Tensor, gate: Tensor, activation: str) -> Tensor:
    """The gradient of `gate` from `pull`, that of `activate(gate, activation)`; equal shapes."""
    if activation == "silu":
        of_gate: Tensor = torch.ops.aten.silu_backward(pull, gate)
    elif activation in {"relu", "relu2"}:
        pull = pull * (2 * F.relu(gate)) if activation == "relu2" else pull
        of_gate = torch.ops.aten.threshold_backward(pull, gate, 0)
    else:
        kind = "tanh" if activation == "gelu_pytorch_tanh" else "none"
        of_gate = torch.ops.aten.gelu_backward(pull, gate, approximate=kind)
    return of_gate
