"""The gated activation of experts outside autograd: forward, and backward together with the routing weights."""

import torch
from torch import Tensor

from bestiary.kernels import lean
from bestiary.kernels.precision import at_least_fp32

CLAMPED = "clamped_swiglu"


def activate(gate_up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """(n, 2I), gate first → act(gate) · up (n, I); alpha and limit count for `CLAMPED` alone."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation != CLAMPED:
        return lean.activate(gate, activation).mul_(up)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(alpha * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


def activate_back(
    gate_up: Tensor, pull: Tensor, weights: Tensor, activation: str, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward through w · act(gate) · up, computed in at least fp32.

    Args:
        gate_up: (n, 2I).   weights: (n, 1), w.
        pull: (n, I), the gradient of w · act(gate) · up as it is without w.
    Returns:
        w · act(gate) · up (n, I) and the gradient of `gate_up` (n, 2I), in gate_up's dtype;
        the gradient of w (n,) in at least fp32.
    """
    dtype, wide = gate_up.dtype, at_least_fp32(gate_up.dtype)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    pull, weights = pull.to(wide), weights.to(wide)
    through = torch.empty_like(gate_up, dtype=wide)
    of_gate, of_up = through.chunk(2, dim=-1)
    if activation == CLAMPED:
        gate_cut, up_cut = ~(gate <= limit), ~(up.abs() <= limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit).add_(1)
        share = torch.sigmoid(alpha * gate)
        active = gate * share
        slope = torch.rsub(share, 1).mul_(gate).mul_(alpha).add_(1).mul_(share)
    else:
        active = lean.activate(gate, activation)
    out = active * up
    of_weights = torch.linalg.vecdot(out, pull)
    pull = pull * weights
    torch.mul(pull, active, out=of_up)
    pull.mul_(up)
    if activation == CLAMPED:
        of_up.masked_fill_(up_cut, 0)
        torch.mul(pull, slope, out=of_gate).masked_fill_(gate_cut, 0)
    elif activation == "silu":
        torch.ops.aten.silu_backward(pull, gate, grad_input=of_gate)
    elif activation in {"relu", "relu2"}:
        torch.mul(pull, gate > 0 if activation == "relu" else 2 * gate.relu(), out=of_gate)
    else:
        kind = "tanh" if activation == "gelu_pytorch_tanh" else "none"
        torch.ops.aten.gelu_backward(pull, gate, approximate=kind, grad_input=of_gate)
    return out.mul_(weights).to(dtype), through.to(dtype), of_weights
