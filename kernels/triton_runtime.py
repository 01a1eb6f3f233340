"""When the Triton implementations can run, and how tensors of any strides become rows for them. Imports no triton.

On a GPU every float dtype up to fp32. With TRITON_INTERPRET=1, set before triton is first imported, fp32 on the CPU:
the interpreter is exact there, for tests; its bfloat16 is not the GPU's.
"""

import importlib.util
import os

import torch
from torch import Tensor

from bestiary.kernels.errors import UnsupportedDispatch

# Triton contracts a·b + c into one rounding by default and warns that 3.10 will not; the results here shall not change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Read once: what decides stays the same while a process runs, and torch.compile traces through the questions below.
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}
WIDEST_ROW = 8192
LEAST_ROWS = 128  # of a product in Triton
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(*tensors: Tensor | None) -> str | None:
    """Why Triton cannot run on these float tensors, for `dispatch.choose`; None: it can."""
    if not INSTALLED:
        return "triton is not installed (pip install 'bestiary[triton]')"
    given = [tensor for tensor in tensors if tensor is not None]
    if not INTERPRETED and any(tensor.device.type != "cuda" for tensor in given):
        return "Triton needs tensors on a CUDA or ROCm device"
    if INTERPRETED and any(tensor.device.type != "cpu" for tensor in given):
        return "TRITON_INTERPRET keeps Triton on the CPU"
    for tensor in given:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"Triton kernels take plain tensors, not {type(tensor).__name__}"
        if tensor.dtype not in FLOATS:
            return f"Triton kernels compute in fp32, and {tensor.dtype} needs another implementation"
        if INTERPRETED and tensor.dtype != FLOATS[0]:
            return "Triton's interpreter is exact in fp32 only"
    if any(tensor.device != given[0].device for tensor in given):
        return f"tensors are on {' and '.join(str(tensor.device) for tensor in given)}"
    if given and not INTERPRETED and given[0].device.index != torch.cuda.current_device():
        return f"tensors are on {given[0].device} and Triton launches on cuda:{torch.cuda.current_device()}"
    return None


def norm_obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Why RMSNorm cannot run in Triton, for `dispatch.choose`; None: it can."""
    if x.shape[-1] > WIDEST_ROW:
        return f"rows of {x.shape[-1]} do not fit in the registers of a program, which hold {WIDEST_ROW}"
    return obstacle(x, weight)


def rope_obstacle(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Why a turn cannot run in Triton, for `dispatch.choose`; None: it can."""
    if cos.requires_grad or sin.requires_grad:
        return "cos and sin ask for gradients"
    return obstacle(x, cos, sin)


def product_obstacle(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the log-prob core cannot run on these tensors in Triton, for `dispatch.choose`; None: it can."""
    if hidden.dtype != weight.dtype:
        return f"hidden is {hidden.dtype} and weight {weight.dtype}, and its products take one dtype"
    if hidden.dtype == torch.float16:
        return "gradients of logits underflow in float16"
    if torch.version.hip is not None and hidden.dtype == torch.bfloat16:
        return "products of bfloat16 with sums in fp32 are cuBLAS's"
    return obstacle(hidden, weight, bias)


def lora_obstacle(x: Tensor, weight: Tensor, bias: Tensor | None, lora_A: Tensor, lora_B: Tensor) -> str | None:
    """Why a linear layer with an adapter cannot run in Triton, for `dispatch.choose`; None: it can."""
    dtypes = {tensor.dtype for tensor in (x, weight, bias, lora_A, lora_B) if tensor is not None}
    if len(dtypes) > 1:
        return f"dtypes differ ({', '.join(sorted(map(str, dtypes)))}), and its products take one"
    if not INTERPRETED and x.dtype == torch.float32:
        return "products of float32 are cuBLAS's"
    found = obstacle(x, weight, bias, lora_A, lora_B)
    # Asked last: under torch.compile it splits lengths into two graphs, and only where Triton could run.
    if found is None and not INTERPRETED and x.numel() < LEAST_ROWS * x.shape[-1]:
        return f"fewer than {LEAST_ROWS} rows fill no tile"
    return found


def require(operation: str, found: str | None) -> None:
    """Raises `UnsupportedDispatch` for an obstacle: a wrapper that is called directly says why it cannot run."""
    if found is not None:
        raise UnsupportedDispatch(f"{operation} = 'triton' cannot run: {found}.", remedy="use the torch implementation")


def as_rows(x: Tensor) -> Tensor:
    """(..., d) → (R, d) with adjacent last coordinates; a view where strides allow, else a copy."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def warps(elements: int) -> int:
    """Warps of a program that holds `elements` fp32 numbers at a time: 16 a thread, between 1 and 16."""
    return min(max(power_of_two(elements) // 512, 1), 16)
