"""The second half of a gated MLP, act(gate) · up through a linear layer, without keeping the product in between.

Activation and product apart keep gate, up and their product for the backward pass: a third of what an MLP keeps. As one
function the product is made again there, at the price of one multiplication a number, because the activated gate is
computed in that pass anyway.
"""

from typing import Any

import torch
from torch import Tensor

from bestiary.kernels import lean
from bestiary.kernels.activation import gated
from bestiary.kernels.dispatch import choose
from bestiary.kernels.linear import linear
from bestiary.kernels.log_prob_autograd import refuse_second_order
from bestiary.kernels.products import affine, mm


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """(act(gate) · up) Wᵀ + b.

    Args:
        gate, up: (..., in), equal shapes.   weight: (out, in).   bias: (out,) or None.
        activation: silu, gelu, gelu_pytorch_tanh, relu or relu2.
    Returns:
        (..., out), the bits of `linear(gated(gate, up, activation), weight, bias)`.
    Raises:
        UnsupportedDispatch: second-order gradients, which `force(gated_linear="reference", activation="torch")` gives.
    Cost:
        Saved: gate, up and the weight. On a GPU the activation has a kernel of its own, so the two run apart there.
    """
    if choose("gated_linear", {"lean": _obstacle(gate, up, weight, bias), "reference": None}) == "reference":
        return linear(gated(gate, up, activation), weight, bias)
    y: Tensor = _GatedLinear.apply(gate, up, weight, bias, activation)
    return y


def _obstacle(*tensors: Tensor | None) -> str | None:
    """Why the two do not run as one function; None: they do."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.device.type != "cpu" for tensor in given):
        return "on an accelerator the activation has a kernel of its own"
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in given):
        return "its backward pass takes plain tensors"
    if torch.is_autocast_enabled("cpu"):
        return "autocast narrows products"
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "it has no derivatives forward, and no batches of torch.func"
    return lean.obstacle(*given)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        x = lean.activate(gate, activation).mul_(up)
        return affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("gated_linear", "lean")
        gate, up, weight = ctx.saved_tensors
        for_gate, for_up, for_weight, for_bias, _ = ctx.needs_input_grad
        upstream = upstreams[0].reshape(-1, weight.shape[0])
        of_gate = of_up = of_weight = None
        with torch.autocast("cpu", enabled=False):
            activated = lean.activate(gate, ctx.activation)
            if for_weight:
                of_weight = mm(upstream.t(), (activated * up).reshape(-1, weight.shape[1]))
            if for_gate or for_up:
                pull = mm(upstream, weight).view(gate.shape)
            if for_up:
                of_up = activated.mul_(pull)
            if for_gate:
                of_gate = lean.activate_back(pull.mul_(up), gate, ctx.activation)
            return of_gate, of_up, of_weight, upstream.sum(0) if for_bias else None, None
