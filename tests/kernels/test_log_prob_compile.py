"""The log-prob core inside compiled code: one documented graph break, and the eager numbers."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.log_prob import linear_log_prob

from .naive_head import case


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scalar(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return 0.5 * linear_cross_entropy(torch.tanh(hidden), weight, target, z_loss=0.1)


def per_token(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    out = linear_log_prob(torch.tanh(hidden), weight, target, entropy=True)
    assert out.entropy is not None
    return (out.log_prob * out.entropy).sum()


@pytest.mark.parametrize("function", [scalar, per_token])
def test_the_graph_breaks_once_and_only_there(function: Callable[..., Tensor]) -> None:
    """Before the head, whose cost depends on how many targets count; what surrounds it is compiled."""
    explained = torch._dynamo.explain(function)(*case(9, 67).leaves()[:3])
    assert explained.graph_break_count == 1
    assert "dropped tokens and chunks" in explained.break_reasons[0].reason


@pytest.mark.parametrize("function", [scalar, per_token])
def test_compiled_is_eager(function: Callable[..., Tensor]) -> None:
    """Ignored tokens first, last and between."""
    hidden, weight, target, _ = case(9, 67, ignored=0.0).leaves()
    target[[0, 4, 8]] = -100
    results = []
    for run in (function, torch.compile(function, backend="aot_eager")):
        loss = run(hidden, weight, target)
        results.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-14)
