"""Recomputing norms and activations: the same forward bits, the same gradients, less kept for the backward pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bestiary.kernels.activation import gated
from bestiary.kernels.dispatch import force
from bestiary.kernels.gated_linear import gated_linear
from bestiary.kernels.norm import rms_norm

STYLES = [{}, {"scale_then_cast": True}, {"scale_then_cast": True, "plus_one": True}, {"plus_one": True}]
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh"]


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def kept_elements(run: Callable[[], Tensor]) -> int:
    """Elements of distinct tensors that autograd keeps."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.numel() for tensor in kept.values())


def both(run: Callable[[], Tensor], operation: str, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients of the recomputing form and of plain autograd, for one random upstream gradient."""
    found = []
    for implementation in ("lean", "torch"):
        with force(**{operation: implementation}):
            out = run()
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, upstream)])
    return found[0], found[1]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 4, 24), (0, 24)])
def test_norm_equals_plain_autograd(style: dict[str, bool], shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape), drawn(24, seed=1)
    lean, plain = both(lambda: rms_norm(x, weight, 1e-3, **style), "norm", (x, weight))
    assert torch.equal(lean[0], plain[0])
    for ours, theirs in zip(lean[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_equals_plain_autograd(activation: str) -> None:
    gate, up = drawn(7, 12), drawn(7, 12, seed=1)
    lean, plain = both(lambda: gated(gate, up, activation), "activation", (gate, up))
    assert torch.equal(lean[0], plain[0])
    for ours, theirs in zip(lean[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_norm_gradcheck_with_strided_input(style: dict[str, bool]) -> None:
    x, weight = drawn(8, 4), drawn(8, seed=1)
    with force(norm="lean"):
        assert torch.autograd.gradcheck(lambda x, w: rms_norm(x.t(), w, 1e-3, **style), (x, weight))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_gradcheck_with_halves_of_one_tensor(activation: str) -> None:
    both_halves = drawn(3, 10)
    with force(activation="lean"):
        assert torch.autograd.gradcheck(lambda x: gated(*x.chunk(2, -1), activation), (both_halves,))


def test_an_expanded_upstream_gradient_is_read_right() -> None:
    """`sum().backward()` hands over one element with strides of zero."""
    x, weight = drawn(4, 6), drawn(6, seed=1)
    grads = []
    for implementation in ("lean", "torch"):
        with force(norm=implementation):
            grads.append(torch.autograd.grad(rms_norm(x, weight, 1e-3).sum(), (x, weight)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_no_further_from_float64(dtype: torch.dtype) -> None:
    x, weight = drawn(64, 32, dtype=dtype).detach(), drawn(32, dtype=dtype, seed=1).detach()
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.autograd.grad(rms_norm(exact_x, exact_weight, 1e-3).sum(), (exact_x, exact_weight))
    errors = {}
    for implementation in ("lean", "torch"):
        with force(norm=implementation):
            inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
            found = torch.autograd.grad(rms_norm(*inputs, 1e-3).sum(), inputs)
        errors[implementation] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    for lean, plain in zip(errors["lean"], errors["torch"], strict=True):
        assert lean <= 1.05 * plain


def test_less_is_kept_for_the_backward_pass() -> None:
    x, weight = drawn(50, 24), drawn(24, seed=1)
    gate, up = drawn(50, 24, seed=2), drawn(50, 24, seed=3)
    kept = {}
    for implementation in ("lean", "torch"):
        with force(norm=implementation, activation=implementation):
            kept[implementation] = (
                kept_elements(lambda: rms_norm(x, weight, 1e-3)),
                kept_elements(lambda: gated(gate, up, "silu")),
            )
    assert kept["lean"] == (50 * 24 + 24 + 50, 2 * 50 * 24)
    assert kept["torch"][0] > kept["lean"][0]
    assert kept["torch"][1] == 3 * 50 * 24


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "relu", "relu2"])
def test_a_product_behind_an_activation_keeps_its_two_inputs_alone(activation: str, bias: bool) -> None:
    """The same bits as one after the other, the same gradients, and (N, in) of the product are not kept."""
    gate, up, weight = drawn(2, 25, 24), drawn(2, 25, 24, seed=1), drawn(8, 24, seed=2)
    leaves = (gate, up, weight, *([drawn(8, seed=3)] if bias else []))
    found, kept = [], []
    for implementation in ("lean", "reference"):

        def run() -> Tensor:
            return gated_linear(gate, up, weight, leaves[3] if bias else None, activation)

        with force(gated_linear=implementation):
            kept.append(kept_elements(run))
            out = run()
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert kept == [2 * 50 * 24 + 8 * 24, 3 * 50 * 24 + 8 * 24]


def test_nothing_changes_where_no_gradient_is_asked_for() -> None:
    x, weight = drawn(3, 8).detach(), drawn(8, seed=1).detach()
    assert not rms_norm(x, weight, 1e-3).requires_grad
