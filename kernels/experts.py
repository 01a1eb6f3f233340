"""Mixture-of-experts MLP: each token through its chosen experts, weighted and summed.

loop      one expert after the other, plain matmuls: the reference, any dtype and device
grouped   tokens sorted by expert, one grouped matmul a projection; bf16, fp16 or fp32 with 16-byte rows
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.activation import clamped_swiglu, gated
from bestiary.kernels.dispatch import choose
from bestiary.kernels.precision import at_least_fp32


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

    def one(self, x: Tensor, expert: int) -> Tensor:
        """(n, in) → (n, out) through expert `expert`."""
        y = F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])
        if self.lora_A is not None and self.lora_B is not None:
            low = F.linear(x.to(self.lora_A.dtype), self.lora_A[expert])
            y = (y + F.linear(low, self.lora_B[expert]) * self.scaling).to(y.dtype)
        return y

    def grouped(self, x: Tensor, offsets: Tensor, expert_of: Tensor) -> Tensor:
        """(n, in) sorted by expert → (n, out); `offsets` (E,) int32 are the ends, `expert_of` (n,) the experts."""
        y = F.grouped_mm(x, self.weight.transpose(-1, -2), offs=offsets)
        if self.bias is not None:
            # Gathered wide: the gradient of a gather is a sum over tokens, and a sum in bf16 stops growing.
            y = (y + self.bias.to(at_least_fp32(y.dtype))[expert_of]).to(y.dtype)
        if self.lora_A is not None and self.lora_B is not None:
            low = F.grouped_mm(x.to(self.lora_A.dtype), self.lora_A.transpose(-1, -2), offs=offsets)
            y = (y + F.grouped_mm(low, self.lora_B.transpose(-1, -2), offs=offsets) * self.scaling).to(y.dtype)
        return y


def experts_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    *,
    activation: str = "silu",
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Σ_k weights[n, k] · down_e(act(gate_e x_n) · up_e x_n) over the chosen experts e = indices[n, k].

    Args:
        x: (N, H).   indices: (N, K) int64 in [0, E).   weights: (N, K).
        gate_up: E projections H → 2I, gate rows first.   down: E projections I → H.
        activation: gate activation; ignored with `clamp` = (alpha, limit), which selects GPT-OSS's clamped SwiGLU.
    Returns:
        (N, H) in x's dtype.
    Raises:
        UnsupportedDispatch: a forced implementation cannot run.
    """
    implementation = choose("experts", {"grouped": _grouped_obstacle(x, gate_up, down), "loop": None})
    run = _grouped if implementation == "grouped" else _loop
    return run(x, indices, weights, gate_up, down, activation, clamp)


def _grouped_obstacle(x: Tensor, *projections: ExpertLinear) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"grouped matmul has no {x.dtype}"
    if x.dtype != torch.bfloat16 and (torch.compiler.is_compiling() or x.is_meta):
        return f"torch traces grouped matmul in bf16 alone, and this is {x.dtype}"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "grouped matmul needs compute capability 8.0"
    if x.shape[0] == 0:
        return "there are no tokens"
    for projection in projections:
        for tensor in (projection.weight, projection.lora_A, projection.lora_B):
            if tensor is not None and (
                tensor.shape[-1] * tensor.element_size() % 16 or tensor.shape[-2] * tensor.element_size() % 16
            ):
                return f"rows of {tuple(tensor.shape)} in {tensor.dtype} are not multiples of 16 bytes"
            if tensor is not None and tensor.dtype != x.dtype:
                return f"weights are {tensor.dtype} and activations {x.dtype}"
    return None


def _activate(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, activation) if clamp is None else clamped_swiglu(gate, up, *clamp)


@torch.compiler.disable  # which experts run is data: tracing would compile one graph after the other
def _loop(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: str,
    clamp: tuple[float, float] | None,
) -> Tensor:
    out = torch.zeros_like(x)
    for expert in torch.unique(indices).tolist() or [0]:  # no token at all: an empty product keeps the graph
        token, slot = torch.where(indices == expert)
        y = down.one(_activate(gate_up.one(x[token], expert), activation, clamp), expert)
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(x.dtype))
    return out


def _grouped(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: str,
    clamp: tuple[float, float] | None,
) -> Tensor:
    num_experts, top_k = gate_up.weight.shape[0], indices.shape[1]
    order = indices.flatten().argsort(stable=True)
    expert_of = indices.flatten()[order]
    token = order // top_k
    offsets = torch.bincount(expert_of, minlength=num_experts).cumsum(0).to(torch.int32)
    y = down.grouped(_activate(gate_up.grouped(x[token], offsets, expert_of), activation, clamp), offsets, expert_of)
    return torch.zeros_like(x).index_add(0, token, (y * weights.flatten()[order, None]).to(x.dtype))
