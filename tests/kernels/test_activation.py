"""Gated activations against transformers."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from bestiary.kernels.activation import clamped_swiglu, gated
from bestiary.models.config import Activation


def halves(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(40, 24, generator=generator, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
    return gate, up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", list(Activation))
def test_bit_equal_with_transformers(activation: Activation, dtype: torch.dtype) -> None:
    """Every member of the enum, under its own name there."""
    gate, up = halves(dtype)
    assert torch.equal(gated(gate, up, activation), ACT2FN[activation.value](gate) * up)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clamped_swiglu_is_bit_equal_with_transformers(dtype: torch.dtype) -> None:
    """Gate and up alternate there; the gate is clamped above only."""
    gate, up = halves(dtype)
    experts = GptOssExperts(
        GptOssConfig(
            hidden_size=8,
            intermediate_size=24,
            num_local_experts=2,
            num_experts_per_tok=1,
            swiglu_alpha=1.5,
            swiglu_limit=1.1,
        )
    )
    expected = experts._apply_gate(torch.stack((gate, up), -1).flatten(-2))
    assert torch.equal(clamped_swiglu(gate, up, 1.5, 1.1), expected)
    assert (gate > 1.1).any()
    assert (gate < -1.1).any()
    assert (up.abs() > 1.1).any()


def test_gradcheck() -> None:
    """Away from the corners of the clamp."""
    gate, up = (tensor[:2].requires_grad_() for tensor in halves(torch.float64))
    for activation in Activation:
        assert torch.autograd.gradcheck(
            lambda g, u, activation=activation: gated(g, u, activation), (gate, up), fast_mode=True
        )
    assert torch.autograd.gradcheck(lambda g, u: clamped_swiglu(g, u, 1.5, 1.1), (gate, up), fast_mode=True)
