"""Products in oneDNN are those of torch, forward and backward, in every operation that uses them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bestiary.kernels import products
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import force, record
from bestiary.kernels.experts import ExpertLinear, experts_mlp
from bestiary.kernels.gated_linear import gated_linear
from bestiary.kernels.linear import linear
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.lora_linear import lora_linear

pytestmark = pytest.mark.skipif(
    products.inner_product is None or torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"},
    reason="oneDNN's inner product is for x86 processors with AVX2",
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def everything_in_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As on a processor that the BLAS holds back, whatever the size; the list counts calls."""
    calls: list[int] = []
    inner = products.inner_product

    def counted(*args: object) -> Tensor:
        calls.append(1)
        product: Tensor = inner(*args)
        return product

    for module in ("products", "linear"):
        monkeypatch.setattr(f"bestiary.kernels.{module}.inner_product", counted)
    monkeypatch.setattr(products, "blas_is_held_back", lambda: True)
    monkeypatch.setattr(products, "SMALL", 0)
    yield calls
    assert calls, "oneDNN never ran"


def close(one: Tensor, other: Tensor) -> None:
    """Within a few roundings of a sum in fp32."""
    torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5 * float(other.abs().max().clamp(min=1)))


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (1, 7, 5), (33, 1, 9), (64, 65, 3), (5, 640, 130)])
def test_products_of_any_shape_and_order(n: int, k: int, m: int, turned: bool) -> None:
    """Into fresh memory, into a slice of other memory, and on top of it."""
    left, right = normal(n, k), normal(k, m, seed=1)
    if turned:
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    expected = left.double() @ right.double()
    close(products.mm(left, right), expected)
    out = normal(2 * n, m + 3, seed=2)
    before, place = out.clone(), out[n:, :m]
    products.put_product(place, left, right)
    close(place, expected)
    products.put_product(place, left, right, add=True)
    close(place, 2 * expected)
    assert torch.equal(out[:n], before[:n])
    assert torch.equal(out[n:, m:], before[n:, m:])


@pytest.mark.parametrize("bias", [False, True])
def test_the_second_half_of_an_mlp_and_all_its_gradients(bias: bool, everything_in_onednn: list[int]) -> None:
    """One product forward, and in the backward pass one for the activations and one for the weight."""
    given = [normal(2, 5, 12), normal(2, 5, 12, seed=1), normal(9, 12, seed=2), *([normal(9, seed=3)] if bias else [])]
    found, expected = (
        [tensor.detach().to(dtype).requires_grad_() for tensor in given] for dtype in (torch.float32, torch.float64)
    )
    pull = normal(2, 5, 9, seed=4)
    one, other = (gated_linear(*some[:3], some[3] if bias else None, "silu") for some in (found, expected))
    one.backward(pull)
    assert len(everything_in_onednn) == 3
    other.backward(pull.double())
    close(one.detach(), other.detach())
    for mine, theirs in zip(found, expected, strict=True):
        close(mine.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 20), (2, 5, 20)])
def test_a_linear_layer_and_all_its_gradients(shape: tuple[int, ...], bias: bool) -> None:
    """First and second order, gradients of any strides, each needed alone."""
    leaves = [normal(*shape), normal(12, 20, seed=1), *([normal(12, seed=2)] if bias else [])]

    def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in inputs]
        y = function(*inputs)
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs[:2])
        return [y, *first, *second, *torch.autograd.grad(function(*inputs).sum(), inputs)]

    with record() as log:
        ours = outcome(linear, leaves)
    assert set(log) == {("linear", "onednn")}
    for one, other in zip(ours, outcome(F.linear, [x.double() for x in leaves]), strict=True):
        close(one, other)
    for index in range(len(leaves)):
        inputs = [x.clone().requires_grad_(i == index) for i, x in enumerate(leaves)]
        linear(*inputs).sum().backward()
        close(inputs[index].grad, ours[-len(leaves) + index])


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"temperature": 0.7}], ids=["plain", "cap", "temperature"])
@pytest.mark.parametrize("vocab", [192, 195])
def test_the_log_prob_core(vocab: int, options: dict[str, float]) -> None:
    """A scalar loss and per-token outputs with every statistic."""
    target = torch.arange(0, 9 * 20, 20)
    target[3] = -100

    def outcome(dtype: torch.dtype) -> list[Tensor]:
        hidden = normal(9, 40).to(dtype).requires_grad_()
        weight = normal(vocab, 40, seed=1).to(dtype).requires_grad_()
        loss = linear_cross_entropy(hidden, weight, target, **options)
        out = linear_log_prob(hidden, weight, target, entropy=True, top1=True, logit_mean=True, **options)
        total = (out.log_prob * out.entropy + out.lse * out.logit_mean).sum()
        leaves = (hidden, weight)
        return [loss, *out, *torch.autograd.grad(loss, leaves), *torch.autograd.grad(total, leaves)]

    for one, other in zip(outcome(torch.float32), outcome(torch.float64), strict=True):
        close(one.detach(), other.detach())


def test_adapters() -> None:
    """Base and low-rank product, and what the backward pass makes of them."""
    leaves = [normal(9, 20), normal(12, 20, seed=1), normal(12, seed=2), normal(4, 20, seed=3), normal(12, 4, seed=4)]

    def outcome(dtype: torch.dtype, name: str) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in leaves]
        with force(lora_linear=name):
            y = lora_linear(*inputs, 0.5)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]

    for one, other in zip(outcome(torch.float32, "fused"), outcome(torch.float64, "reference"), strict=True):
        close(one, other)


@pytest.mark.parametrize("bias", [False, True])
def test_experts(bias: bool) -> None:
    """Every gradient of routed experts."""
    indices = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(11)])

    def outcome(dtype: torch.dtype, name: str) -> list[Tensor]:
        x, weights = normal(11, 8).to(dtype).requires_grad_(), normal(11, 2, seed=1).to(dtype).requires_grad_()
        gate_up = ExpertLinear(normal(4, 32, 8, seed=2).to(dtype).requires_grad_())
        down = ExpertLinear(normal(4, 8, 16, seed=3).to(dtype).requires_grad_())
        if bias:
            gate_up = replace(gate_up, bias=normal(4, 32, seed=4).to(dtype).requires_grad_())
        with force(experts=name):
            y = experts_mlp(x, indices, weights, gate_up, down)
        leaves = [x, weights, *(t for t in (*gate_up.tensors, *down.tensors) if t is not None)]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    for one, other in zip(outcome(torch.float32, "sorted"), outcome(torch.float64, "loop"), strict=True):
        close(one, other)


@pytest.mark.parametrize("bias", [False, True])
def test_flops_are_counted_as_those_of_any_product(bias: bool) -> None:
    """torch's counter sees a linear layer forward and backward, and the products of the log-prob core."""
    x, weight = normal(2, 5, 20).requires_grad_(), normal(64, 20, seed=1).requires_grad_()
    offset = normal(64, seed=2).requires_grad_() if bias else None
    target = torch.arange(10)
    counts = []
    for name in ("onednn", "torch"):
        with force(linear=name), FlopCounterMode(display=False) as counter:
            linear(x, weight, offset).sum().backward()
            linear_cross_entropy(x.flatten(0, 1), weight, target).backward()
        counts.append(counter.get_total_flops())
    assert counts == [2 * 3 * (2 * 10 * 20 * 64)] * 2
