"""MXFP4 to bfloat16 in Triton (OCP Microscaling Formats, v1.0): 32 four-bit floats share a power of two."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.errors import InvalidArgument
from bestiary.kernels.triton_runtime import obstacle, require

BLOCK = 1024  # bytes a program expands
_GROUP_BYTES = 16


@triton.jit
def _e2m1(code):
    """The value of a nibble: sign, two bits of exponent with bias 1, one of mantissa."""
    magnitude = code & 7
    exponent = magnitude >> 1
    mantissa = (magnitude & 1).to(tl.float32) * 0.5
    power = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    value = tl.where(exponent == 0, mantissa, (1.0 + mantissa) * power)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def mxfp4_expand(blocks, scales, out, count, BLOCK: tl.constexpr):
    """Two values for each of BLOCK bytes, side by side."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    byte = first + tl.arange(0, BLOCK)
    code = tl.load(blocks + byte, mask=byte < count, other=0).to(tl.int32)
    scale = tl.load(scales + byte // 16, mask=byte < count, other=127).to(tl.int32)
    # 2^(scale − 127): the scale is fp32's own biased exponent, but for 0, whose power is a subnormal number.
    power = tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)
    low, high = _e2m1(code & 15) * power, _e2m1(code >> 4) * power
    both = tl.interleave(low, high)
    place = 2 * first + tl.arange(0, 2 * BLOCK)
    tl.store(out + place, both.to(out.dtype.element_ty), mask=place < 2 * count)


def dequantize(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Expand MXFP4: value[2i], value[2i + 1] = E2M1[byte_i & 15], E2M1[byte_i >> 4], times 2^(scale − 127).

    Args:
        blocks: (…, G, 16) uint8, two values a byte, the low nibble first.
        scales: (…, G) uint8, the biased exponent of each block of 32, below 255 (which stands for NaN; not checked
            here, a reader of files does).
        dtype: bfloat16 or fp32; both hold every value with a scale up to 252 exactly.
    Returns:
        (…, 32·G) in `dtype`.
    Raises:
        InvalidArgument: shapes or dtypes that do not fit.
        UnsupportedDispatch: says why Triton cannot run here.
    """
    if blocks.shape[-1:] != (_GROUP_BYTES,) or blocks.shape[:-1] != scales.shape:
        raise InvalidArgument(
            f"MXFP4 blocks of shape {tuple(blocks.shape)} do not fit scales of shape {tuple(scales.shape)}.",
            remedy="blocks are (…, G, 16) and scales (…, G)",
        )
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise InvalidArgument(f"MXFP4 is stored as uint8, not {blocks.dtype} and {scales.dtype}.")
    out = torch.empty(*scales.shape[:-1], scales.shape[-1] * 2 * _GROUP_BYTES, dtype=dtype, device=blocks.device)
    require("mxfp4", obstacle(out))
    blocks, scales = blocks.contiguous(), scales.contiguous()
    if out.numel():
        mxfp4_expand[(triton.cdiv(blocks.numel(), BLOCK),)](
            blocks, scales, out, blocks.numel(), BLOCK=BLOCK, num_warps=4
        )
    return out
