"""Rotary embedding against complex multiplication and the classes of transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2

from bestiary.kernels.rope import apply_rope


def setting(rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (B, heads, T, 10), and angles (B, T, rotary_dim / 2)."""
    generator = torch.Generator().manual_seed(rotary_dim)
    x = torch.randn(2, 3, 5, 10, generator=generator, dtype=torch.float64).to(dtype)
    angles = torch.randn(2, 5, rotary_dim // 2, generator=generator, dtype=torch.float64)
    return x, angles


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
def test_a_pair_turns_like_a_complex_number(rotary_dim: int, interleaved: bool) -> None:
    """(a + ib)·e^{iθ} on the leading coordinates; the others pass bit-equal."""
    x, angles = setting(rotary_dim, torch.float64)
    turned = apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved)
    a, b = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if interleaved
        else (
            slice(0, rotary_dim // 2),
            slice(rotary_dim // 2, rotary_dim),
        )
    )
    expected = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(torch.complex(turned[..., a], turned[..., b]), expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "rotary_dim"), [(llama, 10), (glm4, 6), (olmo2, 10)])
def test_bit_equal_with_transformers(theirs: object, rotary_dim: int, dtype: torch.dtype) -> None:
    """Every rounding in the same place; OLMo turns in fp32."""
    x, angles = setting(rotary_dim, dtype)
    wide = theirs is olmo2
    cos, sin = (t.float() if wide else t.to(dtype) for t in (angles.cos(), angles.sin()))
    expected, _ = theirs(x, x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    ours = apply_rope(x, cos, sin, interleaved=theirs is glm4)
    assert ours.dtype == dtype
    assert torch.equal(ours, expected)


def test_gradcheck() -> None:
    """The gradient turns back."""
    x, angles = setting(6, torch.float64)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, interleaved=interleaved: apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved),
            x.requires_grad_(),
            fast_mode=True,
        )
