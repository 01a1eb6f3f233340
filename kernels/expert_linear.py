"""One projection of every expert, for tokens of one expert, for all tokens sorted by expert, and backward by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.products import put_product


@dataclass(frozen=True)
class ExpertLinear:
    """One projection of every expert: x W_eᵀ + b_e, plus the low-rank x A_eᵀ B_eᵀ · scaling where given.

    Args:
        weight: (E, out, in).   bias: (E, out) or None.
        lora_A: (E, r, in), lora_B: (E, out, r), or None both.
    """

    weight: Tensor
    bias: Tensor | None = None
    lora_A: Tensor | None = None
    lora_B: Tensor | None = None
    scaling: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """weight, bias, lora_A, lora_B."""
        return self.weight, self.bias, self.lora_A, self.lora_B

    def one(self, x: Tensor, expert: int) -> Tensor:
        """(n, in) → (n, out) through expert `expert`."""
        y = F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])
        if self.lora_A is not None and self.lora_B is not None:
            low = F.linear(x.to(self.lora_A.dtype), self.lora_A[expert])
            y = (y + F.linear(low, self.lora_B[expert]) * self.scaling).to(y.dtype)
        return y

    def one_into(self, x: Tensor, expert: int, out: Tensor) -> None:
        """`one` without a graph, written to `out` (n, out)."""
        if self.bias is None:
            put_product(out, x, self.weight[expert].t())
        else:
            torch.addmm(self.bias[expert], x, self.weight[expert].t(), out=out)
        if self.lora_A is not None and self.lora_B is not None:
            low = x.to(self.lora_A.dtype) @ self.lora_A[expert].t()
            _add_product(out, low, self.lora_B[expert].t(), self.scaling)

    def one_back(self, upstream: Tensor, expert: int, out: Tensor) -> None:
        """Gradient of x from `upstream` (n, out), written to `out` (n, in)."""
        put_product(out, upstream, self.weight[expert])
        if self.lora_A is not None and self.lora_B is not None:
            low = upstream.to(self.lora_B.dtype) @ self.lora_B[expert]
            _add_product(out, low, self.lora_A[expert], self.scaling)

    def grouped(self, x: Tensor, ends: Tensor, expert_of: Tensor) -> Tensor:
        """(n, in) sorted by expert → (n, out); `ends` (E,) int32, `expert_of` (n,) the experts."""
        y = F.grouped_mm(x, self.weight.transpose(-1, -2), offs=ends)
        if self.bias is not None:
            wide = at_least_fp32(y.dtype)
            y = (y.to(wide) + self.bias.to(wide)[expert_of]).to(y.dtype)
        if self.lora_A is not None and self.lora_B is not None:
            low = F.grouped_mm(x, self.lora_A.transpose(-1, -2), offs=ends)
            y.add_(F.grouped_mm(low, self.lora_B.transpose(-1, -2), offs=ends), alpha=self.scaling)
        return y

    def grouped_back(self, upstream: Tensor, ends: Tensor) -> Tensor:
        """Gradient of x (n, in) from `upstream` (n, out), both sorted by expert."""
        out = F.grouped_mm(upstream, self.weight, offs=ends)
        if self.lora_A is not None and self.lora_B is not None:
            low = F.grouped_mm(upstream, self.lora_B, offs=ends)
            out.add_(F.grouped_mm(low, self.lora_A, offs=ends), alpha=self.scaling)
        return out


class ExpertGradients:
    """Gradients of a projection's parameters, those that are asked for; nothing is allocated for the others.

    Args:
        linear: whose.
        needed: for each of `ExpertLinear.tensors`.
    """

    def __init__(self, linear: ExpertLinear, needed: Sequence[bool]) -> None:
        self.linear, self._needed = linear, tuple(needed)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None  # in at least fp32: a sum over tokens in bf16 stops growing
        self.lora_A: Tensor | None = None
        self.lora_B: Tensor | None = None

    def delivered(self) -> list[Tensor]:
        """Those that were asked for, in the dtypes of the parameters."""
        bias = None if self.bias is None or self.linear.bias is None else self.bias.to(self.linear.bias.dtype)
        return [tensor for tensor in (self.weight, bias, self.lora_A, self.lora_B) if tensor is not None]

    def make_room(self) -> None:
        """Allocate, for `forget` and `add`."""
        rooms = [
            tensor.new_empty(tensor.shape) if wanted and tensor is not None else None
            for tensor, wanted in zip(self.linear.tensors, self._needed, strict=True)
        ]
        self.weight, bias, self.lora_A, self.lora_B = rooms
        self.bias = None if bias is None else bias.to(at_least_fp32(bias.dtype))

    def forget(self, expert: int) -> None:
        """No token chose this expert."""
        for gradient in (self.weight, self.bias, self.lora_A, self.lora_B):
            if gradient is not None:
                gradient[expert].zero_()

    def add(self, expert: int, upstream: Tensor, x: Tensor, weights: Tensor | None, *, first: bool) -> None:
        """Rows of one expert: `upstream` (n, out) and `x` (n, in).

        Args:
            weights: (n, 1); `x` is already multiplied by it, and `upstream` is not.
            first: whether these are the first rows of the expert.
        """
        beta = 0 if first else 1
        if self.weight is not None:
            put_product(self.weight[expert], upstream.t(), x, add=not first)
        if self.bias is not None:
            wide = upstream.to(self.bias.dtype)
            total = (wide if weights is None else wide * weights).sum(0)
            _put(self.bias[expert], total, first)
        lora_A, lora_B, scaling = self.linear.lora_A, self.linear.lora_B, self.linear.scaling
        if self.lora_A is not None and lora_B is not None:
            low = upstream.to(lora_B.dtype) @ lora_B[expert]
            self.lora_A[expert].addmm_(low.t(), x.to(low.dtype), beta=beta, alpha=scaling)
        if self.lora_B is not None and lora_A is not None:
            low = x.to(lora_A.dtype) @ lora_A[expert].t()
            self.lora_B[expert].addmm_(upstream.to(low.dtype).t(), low, beta=beta, alpha=scaling)

    def all(self, upstream: Tensor, x: Tensor, weights: Tensor | None, ends: Tensor) -> None:
        """Rows of all experts, sorted by expert; arguments as in `add`."""
        of_weight, of_bias, of_A, of_B = self._needed
        if of_weight:
            self.weight = F.grouped_mm(upstream.t(), x, offs=ends)
        if of_bias and self.linear.bias is not None:
            wide = upstream.to(at_least_fp32(self.linear.bias.dtype))
            borders = F.pad(ends, (1, 0)).long()
            self.bias = torch.segment_reduce(
                wide if weights is None else wide * weights, "sum", offsets=borders, initial=0, unsafe=True
            )
        lora_A, lora_B, scaling = self.linear.lora_A, self.linear.lora_B, self.linear.scaling
        if of_A and lora_B is not None:
            low = F.grouped_mm(upstream, lora_B, offs=ends)
            self.lora_A = F.grouped_mm(low.t(), x, offs=ends).mul_(scaling)
        if of_B and lora_A is not None:
            low = F.grouped_mm(x, lora_A.transpose(-1, -2), offs=ends)
            self.lora_B = F.grouped_mm(upstream.t(), low, offs=ends).mul_(scaling)


def _add_product(out: Tensor, left: Tensor, right: Tensor, scaling: float) -> None:
    """out += left right · scaling; in the wider dtype where they differ."""
    if out.dtype == left.dtype:
        out.addmm_(left, right, alpha=scaling)
    else:
        out.add_((left @ right).mul_(scaling))


def _put(place: Tensor, value: Tensor, first: bool) -> None:
    if first:
        place.copy_(value)
    else:
        place.add_(value)
