"""MXFP4 against the table of the format, and against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bestiary.bridges.errors import CorruptCheckpoint
from bestiary.bridges.mxfp4 import dequantize


def by_hand(byte: int, scale: int) -> tuple[float, float]:
    """Both values of one byte, from sign, exponent and mantissa bits."""

    def value(nibble: int) -> float:
        sign, exponent, mantissa = -1 if nibble & 8 else 1, nibble >> 1 & 3, nibble & 1
        return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))

    return value(byte & 15) * 2.0 ** (scale - 127), value(byte >> 4) * 2.0 ** (scale - 127)


@given(st.integers(0, 255), st.integers(1, 252))
def test_each_byte_and_scale_by_hand(byte: int, scale: int) -> None:
    blocks = torch.full((1, 16), byte, dtype=torch.uint8)
    values = dequantize(blocks, torch.tensor([scale], dtype=torch.uint8))
    assert values.dtype is torch.bfloat16
    assert values.view(-1, 2).double().unique(dim=0).tolist() == [list(by_hand(byte, scale))]


@settings(deadline=None)
@given(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)), st.integers(0, 2**31))
def test_equals_transformers_on_grids_that_are_not_square(grid: tuple[int, int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 253, grid, dtype=torch.uint8, generator=generator)
    assert torch.equal(dequantize(blocks, scales), convert_moe_packed_tensors(blocks, scales).mT)


@pytest.mark.parametrize(
    ("blocks", "scales", "named"),
    [
        ((2, 3, 16), (3, 2), "shape"),
        ((2, 3, 15), (2, 3), "shape"),
        ((16,), (), "shape"),
    ],
)
def test_grids_that_do_not_fit_are_refused(blocks: tuple[int, ...], scales: tuple[int, ...], named: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=named):
        dequantize(torch.ones(blocks, dtype=torch.uint8), torch.ones(scales, dtype=torch.uint8))


@pytest.mark.parametrize("scale", [0, 255])
def test_scales_that_stand_for_no_weight_are_refused(scale: int) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"scale is {scale}"):
        dequantize(torch.ones(2, 3, 16, dtype=torch.uint8), torch.full((2, 3), scale, dtype=torch.uint8))
