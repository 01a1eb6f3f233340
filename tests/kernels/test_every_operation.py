"""What holds for every operation of kernels/ and each of its torch implementations, whatever it computes."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bestiary.kernels

from .conftest import poisoned
from .operations import OPERATIONS, TRAINING, Operation, Outputs, normal

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
each = pytest.mark.parametrize("operation", TRAINING.values(), ids=list(TRAINING))
Layout = Callable[[Tensor], Tensor]


def apart(x: Tensor) -> Tensor:
    """The same numbers, every other element of the last dimension of memory twice as long."""
    return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2] if x.ndim else x


def transposed(x: Tensor) -> Tensor:
    """The same numbers, the last two dimensions stored the other way round."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else apart(x)


def repeated(x: Tensor) -> Tensor:
    """One row for all: a stride of 0."""
    return x[:1].expand_as(x) if x.ndim else x


def alike(x: Tensor) -> Tensor:
    """One number for all: every stride 0, as the gradient of a sum has."""
    return torch.full((), 0.7, dtype=x.dtype).expand_as(x)


def pulls(out: Outputs) -> list[Tensor]:
    """A random upstream gradient for every output."""
    return [normal(*x.shape, seed=50 + i, dtype=x.dtype) for i, x in enumerate(out)]


def gradients(operation: Operation, inputs: list[Tensor], layout: Layout = lambda x: x) -> list[Tensor]:
    """Outputs, and gradients for upstream gradients of some layout."""
    out = operation(*inputs)
    return [*(x.detach() for x in out), *torch.autograd.grad(out, inputs, [layout(x) for x in pulls(out)])]


def assert_same(operation: Operation, ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, **operation.tolerance)


@each
@pytest.mark.parametrize("layout", [transposed, apart, repeated, alike])
def test_upstream_gradients_may_have_any_strides(operation: Operation, layout: Layout) -> None:
    """`y.sum().backward()` hands over one number for all, a transposition behind the operation a transposed one."""
    inputs = operation.inputs()
    expected = gradients(operation, inputs, lambda x: layout(x).clone(memory_format=torch.contiguous_format))
    assert_same(operation, gradients(operation, inputs, layout), expected)


@each
@pytest.mark.parametrize("layout", [transposed, apart, repeated])
def test_inputs_may_have_any_strides(operation: Operation, layout: Layout) -> None:
    """Views of other tensors; what lies between their elements is never read."""
    if layout is apart and not operation.any_strides:
        layout = transposed
    strided = [layout(x.detach()).requires_grad_() for x in operation.inputs()]
    dense = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in strided]
    assert_same(operation, gradients(operation, strided), gradients(operation, dense))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_memory_that_was_never_written_is_never_read(operation: Operation) -> None:
    """What `torch.empty` returns is NaN; the results are the same bits."""
    inputs = operation.inputs()
    run = (lambda: gradients(operation, inputs)) if operation.trains else (lambda: list(forward(operation, inputs)))
    expected = run()
    with poisoned():
        assert torch.empty(3).isnan().all(), "the poison works"
        ours = run()
    for a, b in zip(ours, expected, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@torch.no_grad()
def forward(operation: Operation, inputs: list[Tensor]) -> Outputs:
    return operation(*inputs)


@each
def test_inputs_stay_as_they_were(operation: Operation) -> None:
    """Nothing is computed in the caller's memory, nor in that of the upstream gradients."""
    inputs = operation.inputs()
    out = operation(*inputs)
    given = pulls(out)
    before = [x.detach().clone() for x in (*inputs, *given)]
    torch.autograd.grad(out, inputs, given)
    assert all(torch.equal(x, y) for x, y in zip((*inputs, *given), before, strict=True))


@each
def test_every_backward_call_gives_its_own_gradients(operation: Operation) -> None:
    """On a kept graph, each scaled as it is asked for, and the first is not touched by the second."""
    inputs = operation.inputs()
    expected = gradients(operation, inputs)
    out = operation(*inputs)
    scales = (1.0, -0.5, 1.0)
    calls = [torch.autograd.grad(out, inputs, [s * x for x in pulls(out)], retain_graph=True) for s in scales]
    for scale, call in zip(scales, calls, strict=True):
        assert_same(operation, list(call), [scale * x for x in expected[len(out) :]])


@each
def test_a_frozen_input_has_no_gradient_and_changes_no_other(operation: Operation) -> None:
    """Each input in turn."""
    expected = operation.inputs()
    wanted = gradients(operation, expected)
    for frozen in range(len(expected)):
        inputs = operation.inputs()
        inputs[frozen].requires_grad_(False)
        out = operation(*inputs)
        if not any(x.requires_grad for x in inputs):
            assert not any(x.requires_grad for x in out)
            continue
        torch.autograd.backward(out, pulls(out))
        assert inputs[frozen].grad is None
        for i, x in enumerate(inputs):
            if i != frozen:
                torch.testing.assert_close(x.grad, wanted[len(out) + i], **operation.tolerance)


@pytest.mark.parametrize("name", [name for name, operation in TRAINING.items() if operation.dtype == torch.float64])
def test_gradcheck(name: str) -> None:
    """Numerical derivatives in float64, of every output with respect to every input."""
    assert torch.autograd.gradcheck(TRAINING[name], TRAINING[name].inputs(), fast_mode=True)


INNER = {"expert_rows"}  # chosen inside of another operation


def test_no_operation_is_left_out() -> None:
    """Whatever kernels/ chooses an implementation of stands in `operations`."""
    chosen: set[str] = set()
    for path in Path(bestiary.kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "choose":
                assert isinstance(node.args[0], ast.Constant)
                chosen.add(str(node.args[0].value))
    assert chosen - INNER == {operation for case in OPERATIONS.values() for operation in case.forced}
