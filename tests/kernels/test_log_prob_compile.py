"""The log-prob core inside compiled code: a whole graph for every number of tokens, and the eager numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bestiary.kernels import log_prob_ops
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import LabelOutOfRange
from bestiary.kernels.log_prob import linear_log_prob

from .naive_head import case

CAPPED: dict[str, Any] = {"divisor": 1.9, "softcap": 1.3, "temperature": 0.7}
CLASSES = torch.linspace(0.2, 1.7, 67, dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scalar(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    loss, out = linear_cross_entropy(
        torch.tanh(hidden), weight, target, bias=bias, entropy=True, top1=True, return_log_prob=True, **CAPPED
    )
    assert out.entropy is not None
    assert out.top1 is not None
    assert not any(column.requires_grad for column in (out.log_prob, out.lse, out.entropy))
    return 0.5 * loss + out.entropy.mean() + out.top1.sum()


def smoothed(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "class_weights": CLASSES, "num_items": 5}
    return linear_cross_entropy(torch.tanh(hidden), weight, target, bias=bias, **options)


def unreduced(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    options = {"label_smoothing": 0.1, "class_weights": CLASSES, "reduction": "none"}
    return linear_cross_entropy(torch.tanh(hidden), weight, target, bias=bias, **options).square().sum()


def per_token(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    out = linear_log_prob(torch.tanh(hidden), weight, target, bias=bias, entropy=True, top1=True, logit_mean=True)
    assert out.entropy is not None
    assert out.logit_mean is not None
    return (out.log_prob * out.entropy + out.logit_mean).sum()


def one_column(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    return linear_log_prob(hidden, weight, target, **CAPPED).log_prob.sum()


FUNCTIONS = [scalar, smoothed, unreduced, per_token, one_column]


def leaves(tokens: int, ignored: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, target, bias = case(tokens, 67, ignored=0.0).leaves()
    assert bias is not None
    target[ignored] = -100
    return hidden, weight, bias, target


def outcome(run: Callable[..., Tensor], *given: Tensor) -> list[Tensor | None]:
    loss = run(*given)
    return [loss.detach(), *torch.autograd.grad(loss, given[:3], allow_unused=True)]


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_whole_graph_gives_the_eager_numbers(function: Callable[..., Tensor]) -> None:
    """Ignored tokens first, last and between, none, all; one graph for the first length and one for all others."""
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=count, fullgraph=True)
    for tokens, ignored in ((9, [0, 4, 8]), (9, []), (5, [0, 1, 2, 3, 4]), (31, [3]), (64, [])):
        given = leaves(tokens, ignored)
        for ours, eager in zip(outcome(compiled, *given), outcome(function, *given), strict=True):
            if eager is None:
                assert ours is None
            else:
                torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-14)
    assert count.frame_count == 2


def test_what_is_frozen_is_not_computed() -> None:
    """The operator is told which gradients somebody wants; the others have no elements."""
    hidden, weight, bias, target = leaves(9, [])
    weight.requires_grad_(False)
    shapes = []
    original = log_prob_ops._loss

    def watched(*given: Any) -> Any:
        shapes.append([tuple(gradient.shape) for gradient in original(*given)[-3:]])
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_prob_ops, "_loss", watched)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        linear_cross_entropy(hidden, weight, target)
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, target, bias=bias)
    assert shapes == [[tuple(hidden.shape), (0,), (0,)], [(0,), (0,), (0,)]]


def test_a_label_outside_the_vocabulary_is_named() -> None:
    """By the operator, when it runs."""
    hidden, weight, _, target = leaves(9, [])
    target[3] = 67
    for function in (linear_log_prob, linear_cross_entropy):
        with pytest.raises(LabelOutOfRange, match="label 67 at flat position 3"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(hidden, weight, target)


def test_the_reference_is_outside_of_graphs() -> None:
    """Forced, it breaks the graph once: torch would have to see through it."""
    with force(log_prob="reference"):
        explained = torch._dynamo.explain(per_token)(*leaves(9, [1]))
    assert explained.graph_break_count == 1
    assert "dropped tokens and chunks" in explained.break_reasons[0].reason


@pytest.mark.parametrize("bias", [False, True])
def test_the_operators_keep_their_promises(bias: bool) -> None:
    """Fake tensors, autograd registration and dynamic shapes agree with what runs (torch's own checks)."""
    hidden, weight, offset, target = leaves(9, [2, 5])
    given = (hidden, weight, offset if bias else None, target, None)
    numbers = (1.9, 1.3, 0.7, -100)
    label = torch.full((9,), -0.1, dtype=torch.float64)
    mass = torch.ones((), dtype=torch.float64)
    needs = (True, True, bias)
    torch.library.opcheck(
        log_prob_ops._loss, (*given, label, -label, mass, 0.1, 0.2, *numbers, True, False, *needs, "chunked")
    )
    torch.library.opcheck(log_prob_ops._rows, (*given, *numbers, True, True, True, "chunked"))
