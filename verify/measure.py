"""The figures that gates judge: differences of two tensors, relative to the spread of the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _pair(ours: Tensor, reference: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both as float64 on the CPU, or None where shapes differ."""
    if ours.shape != reference.shape:
        return None
    return ours.detach().to("cpu", torch.float64), reference.detach().to("cpu", torch.float64)


def _scale(reference: Tensor) -> float:
    """Standard deviation, or the rms where that is smaller than rounding (constant tensors, single elements)."""
    rms = float(reference.square().mean().sqrt())
    spread = float(reference.std(correction=0))
    return spread if spread > 1e-9 * rms else rms


def max_over_std(ours: Tensor, reference: Tensor) -> float:
    """max|ours − reference| / std(reference); inf where shapes differ or a value is not finite."""
    pair = _pair(ours, reference)
    if pair is None:
        return math.inf
    a, b = pair
    if a.numel() == 0:
        return 0.0
    worst = float((a - b).abs().max())
    if not math.isfinite(worst):
        return math.inf
    scale = _scale(b)
    return worst / scale if scale else (0.0 if worst == 0 else math.inf)


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    """rms(ours − reference) / rms(reference); inf where shapes differ or a value is not finite."""
    pair = _pair(ours, reference)
    if pair is None:
        return math.inf
    a, b = pair
    if a.numel() == 0:
        return 0.0
    difference = float((a - b).square().mean().sqrt())
    if not math.isfinite(difference):
        return math.inf
    scale = float(b.square().mean().sqrt())
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


def bit_equal(ours: Tensor, reference: Tensor) -> bool:
    """Same dtype, shape and raw bits (so that −0.0, NaN payloads and subnormals count)."""
    if ours.dtype != reference.dtype or ours.shape != reference.shape:
        return False
    a, b = ours.detach().cpu().contiguous(), reference.detach().cpu().contiguous()
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) if a.numel() else True


def mean_kl(ours: Tensor, reference: Tensor) -> float:
    """Mean over positions of KL(reference ‖ ours) in nats, from logits (…, V)."""
    p = reference.to(torch.float64).log_softmax(-1)
    q = ours.to(torch.float64).log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
