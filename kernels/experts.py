"""Mixture-of-experts MLP: each token through its chosen experts, weighted and summed.

loop      one expert after the other under plain autograd: the reference, which float64 runs uncompiled
sorted    tokens sorted by expert, plain products one expert after the other, backward by hand; any dtype and device
grouped   the same with one grouped matmul a projection; bf16, fp16 or fp32 with 16-byte rows

The last two are one operator (`experts_sorted`), which compiled graphs hold as one node.
"""

import torch
from torch import Tensor

from bestiary.kernels.activation import clamped_swiglu, gated
from bestiary.kernels.deferred import uncompiled
from bestiary.kernels.dispatch import choose
from bestiary.kernels.expert_linear import ExpertLinear
from bestiary.kernels.experts_sorted import sorted_experts

__all__ = ["ExpertLinear", "experts_mlp"]


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
        x: (N, H).   weights: (N, K).
        indices: (N, K) int64 in [0, E), each expert once a token; E or more: one that is elsewhere and adds nothing.
        gate_up: E projections H → 2I, gate rows first.   down: E projections I → H.
        activation: gate activation; ignored with `clamp` = (alpha, limit), which selects GPT-OSS's clamped SwiGLU.
    Returns:
        (N, H) in x's dtype.
    Raises:
        UnsupportedDispatch: a forced implementation cannot run.
    """
    obstacles = {
        "sorted": _sorted_obstacle(x, gate_up, down),
        "grouped": _grouped_obstacle(x, gate_up, down),
        "loop": None,
    }
    implementation = choose("experts", {name: obstacles[name] for name in _fastest_first(x)})
    if implementation == "loop":
        return _loop(x, indices, weights, gate_up, down, activation, clamp)
    return _grouped(x, indices, weights, gate_up, down, activation, clamp, implementation == "grouped")


def _fastest_first(x: Tensor) -> tuple[str, ...]:
    if x.dtype == torch.float64 and not torch.compiler.is_compiling() and not x.is_meta:
        return ("loop", "sorted", "grouped")
    # One expert after the other the host must know how many rows each has; on the CPU it does, and rows stay in cache.
    return ("sorted", "grouped", "loop") if x.device.type in ("cpu", "meta") else ("grouped", "sorted", "loop")


def _sorted_obstacle(x: Tensor, *projections: ExpertLinear) -> str | None:
    from torch.distributed.tensor import DTensor

    for projection in projections:
        if any(isinstance(tensor, DTensor) for tensor in projection.tensors):
            return "its weights are distributed"
        for tensor in (projection.weight, projection.bias):
            if tensor is not None and tensor.dtype != x.dtype:
                return f"weights are {tensor.dtype} and activations {x.dtype}"
    return None


def _grouped_obstacle(x: Tensor, *projections: ExpertLinear) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"grouped matmul has no {x.dtype}"
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
            if tensor is not None and not _aligned(tensor):
                return f"a weight of strides {tensor.stride()} lies off the borders of 16 bytes"
            if tensor is not None and tensor.dtype != x.dtype:
                return f"weights are {tensor.dtype} and activations {x.dtype}"
    return _sorted_obstacle(x, *projections)


def _aligned(tensor: Tensor) -> bool:
    """Whether grouped matmul takes a (E, out, in) weight as it lies: rows or columns of adjacent numbers, 16 bytes
    apart."""
    near, far = sorted(tensor.stride()[1:])
    # A compiler traces strides and not places; there weights are parameters, which begin where torch allocates.
    steps = (tensor.stride(0), far, 0 if torch.compiler.is_compiling() else tensor.storage_offset())
    return near == 1 and all(step * tensor.element_size() % 16 == 0 for step in steps)


def _activate(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, activation) if clamp is None else clamped_swiglu(gate, up, *clamp)


@uncompiled("which experts run is data, and tracing would compile one graph after the other")  # forced
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
    here = indices[indices < gate_up.weight.shape[0]]
    for expert in torch.unique(here).tolist() or [0]:  # no token at all: an empty product keeps the graph
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
    at_once: bool,
) -> Tensor:
    return sorted_experts(x, indices, weights, gate_up, down, activation, clamp, grouped=at_once)
