"""MXFP4: 4-bit floats in blocks of 32 that share one power of two (OCP Microscaling Formats, v1.0).

    value[2i], value[2i + 1] = E2M1[byte_i & 15] · 2^(scale − 127), E2M1[byte_i >> 4] · 2^(scale − 127)

A value has two significant bits, so bfloat16 holds it exactly (up to scale 252; beyond, 6 · 2^126 overflows it).
This is a reader: what is written again is the bfloat16 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bestiary.bridges.errors import CorruptCheckpoint
from bestiary.kernels.dispatch import choose
from bestiary.kernels.triton_runtime import obstacle

BLOCK = 32
BLOCK_BYTES = BLOCK // 2
_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check_shapes(name: str, blocks: Sequence[int], scales: Sequence[int], *, read_from: str | None = None) -> None:
    """Raise `CorruptCheckpoint` unless `blocks` is (…, G, 16) and `scales` the same without the last axis."""
    if len(blocks) < 2 or blocks[-1] != BLOCK_BYTES or tuple(blocks[:-1]) != tuple(scales):
        raise CorruptCheckpoint(
            f"{name}: MXFP4 blocks of shape {tuple(blocks)} do not fit scales of shape {tuple(scales)}.",
            read_from=read_from,
            remedy=f"blocks are (…, G, {BLOCK_BYTES}) and scales (…, G); fetch the checkpoint again",
        )


def dequantize(
    blocks: Tensor, scales: Tensor, *, name: str = "tensor", read_from: str | None = None, first: int = 0
) -> Tensor:
    """Expand MXFP4 to bfloat16.

    Args:
        blocks: (…, G, 16) uint8, two values a byte, the low nibble first.
        scales: (…, G) uint8, the biased exponent of each block of 32.
        name, read_from, first: for the error message: the tensor, its file, and which of its rows comes first here.
    Returns:
        (…, 32·G) bfloat16.
    Raises:
        CorruptCheckpoint: shapes that do not fit, or scales of an expert (or of all) that are all zero (every value
            would be below 2^-124: the mark of scales that were never written), or the reserved scale 255 (NaN).
    """
    check_shapes(name, blocks.shape, scales.shape, read_from=read_from)
    by_expert = scales.flatten(1) if scales.ndim > 2 else scales.reshape(1, -1)
    empty = (by_expert == 0).all(dim=1).nonzero().flatten().tolist() if scales.numel() else []
    if empty:
        where = f" of expert {first + empty[0]}" if scales.ndim > 2 else ""
        raise CorruptCheckpoint(
            f"{name}_scales: every MXFP4 scale is 0{where}.",
            read_from=read_from,
            remedy="the scales were lost on the way; fetch the checkpoint again",
        )
    if bool((scales == 255).any()):
        raise CorruptCheckpoint(
            f"{name}_scales: an MXFP4 scale is 255, which stands for NaN.",
            read_from=read_from,
            remedy="fetch the checkpoint again",
        )
    wanted = blocks.new_empty(0, dtype=torch.bfloat16)
    if choose("mxfp4", {"triton": obstacle(wanted), "torch": None}) == "triton":
        from bestiary.kernels.triton_mxfp4 import dequantize as expand  # needs the optional triton

        return expand(blocks, scales)
    nibbles = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16, device=blocks.device)
    # One 32-bit word per byte holds both its values, so a block is 16 look-ups.
    words = torch.stack((nibbles.repeat(16), nibbles.repeat_interleave(16)), -1).view(torch.int32).flatten()
    values = words.index_select(0, blocks.flatten().int()).view(torch.bfloat16).view(*scales.shape, BLOCK)
    exponents = torch.arange(256, dtype=torch.float64, device=blocks.device) - _BIAS
    powers = torch.exp2(exponents).to(torch.bfloat16)
    return values.mul_(powers[scales.int()][..., None]).flatten(-2)
