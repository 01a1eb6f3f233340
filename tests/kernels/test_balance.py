"""The load-balancing loss against transformers'."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from bestiary.kernels.balance import load_balancing_loss
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import promoted

EXPERTS, TOP_K, LAYERS, BATCH, TOKENS = 12, 3, 3, 2, 9


def router_logits() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH * TOKENS, EXPERTS)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(LAYERS))


@pytest.mark.parametrize("padded", [False, True])
def test_value_and_gradient_equal_transformers(padded: bool) -> None:
    """Over several layers, with and without padding."""
    mask = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]]) if padded else None
    ours, theirs = router_logits(), router_logits()
    loss = load_balancing_loss(ours, TOP_K, None if mask is None else mask.reshape(-1))
    with promoted():
        expected = load_balancing_loss_func(theirs, EXPERTS, TOP_K, None if mask is None else mask.long())
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    loss.backward()
    expected.backward()
    for a, b in zip(ours, theirs, strict=True):
        assert max_over_std(a.grad, b.grad) < 1e-13
    if mask is not None:
        assert ours[0].grad[~mask.reshape(-1)].abs().max() == 0


def test_an_even_router_costs_top_k_and_a_collapsed_one_more() -> None:
    """E · Σ f·p with f = K / E and p = 1 / E is K; one favourite of all tokens costs up to E."""
    even = torch.eye(EXPERTS, dtype=torch.float64).mul(1e-9)
    assert abs(float(load_balancing_loss((even,), 1)) - 1.0) < 1e-6
    collapsed = torch.zeros(EXPERTS, EXPERTS, dtype=torch.float64)
    collapsed[:, 0] = 50.0
    assert abs(float(load_balancing_loss((collapsed,), 1)) - EXPERTS) < 1e-6


def test_narrow_logits_are_summed_in_fp32() -> None:
    """A count of tokens would stop growing in bf16."""
    many = torch.zeros(5000, EXPERTS, dtype=torch.bfloat16)
    loss = load_balancing_loss((many,), TOP_K)
    assert loss.dtype == torch.float32
    # Ties all go to the same K experts, whose mean probability is 1 / E rounded to bf16.
    assert abs(float(loss) - TOP_K * EXPERTS * float(torch.tensor(1 / EXPERTS).bfloat16())) < 1e-3
