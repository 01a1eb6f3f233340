"""A linear layer and its adapter as one function: the reference's numbers and gradients, less kept and allocated."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bestiary.kernels.dispatch import force, record
from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.lora_linear import lora_linear, reference

from .conftest import poisoned

SCALING = 1.75
NAMES = ("x", "weight", "bias", "lora_A", "lora_B")
TRAINED = ("x", "lora_A", "lora_B")  # what asks for a gradient in a LoRA step


class Inputs(NamedTuple):
    """Arguments of `lora_linear`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_A: Tensor
    lora_B: Tensor

    def leaves(self, *names: str) -> list[Tensor]:
        """Those of the names that are there, gradients on."""
        found = [leaf for name in names if (leaf := getattr(self, name)) is not None]
        return [tensor.requires_grad_() for tensor in found]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    leading: tuple[int, ...] = (2, 5),
    width: int = 12,
    out: int = 7,
    rank: int = 3,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    adapter: torch.dtype | None = None,
) -> Inputs:
    adapter = dtype if adapter is None else adapter
    return Inputs(
        drawn(*leading, width, seed=0, dtype=dtype),
        drawn(out, width, seed=1, dtype=dtype),
        drawn(out, seed=2, dtype=dtype) if bias else None,
        drawn(rank, width, seed=3, dtype=adapter),
        drawn(out, rank, seed=4, dtype=adapter),
    )


def results(name: str, of: Inputs, *trained: str) -> list[Tensor]:
    """Output and gradients of one implementation, for one random upstream gradient."""
    leaves = of.leaves(*trained)
    with force(lora_linear=name), poisoned():
        y = lora_linear(*of, SCALING)
        return [y.detach(), *torch.autograd.grad(y, leaves, drawn(*y.shape, seed=9, dtype=y.dtype))]


shapes = st.tuples(
    st.lists(st.sampled_from([0, 1, 3]), max_size=2).map(tuple),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([1, 3]),
)


# ---------------------------------------------------------------------------------------------------- what it computes


@settings(max_examples=60, deadline=None)
@given(
    shapes, st.booleans(), st.sets(st.sampled_from(NAMES), min_size=1), st.sampled_from([torch.float64, torch.float32])
)
def test_equals_the_reference_whatever_trains(shape: Any, bias: bool, trained: set[str], dtype: torch.dtype) -> None:
    one, other = (inputs(*shape, bias=bias, dtype=dtype) for _ in range(2))
    names = [name for name in NAMES if name in trained]
    if names == ["bias"] and not bias:
        names = ["x"]  # there is none to train
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, theirs in zip(results("fused", one, *names), results("reference", other, *names), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(shapes, st.booleans())
def test_gradcheck(shape: Any, bias: bool) -> None:
    leaves = inputs(*shape, bias=bias).leaves(*NAMES)

    def run(*tensors: Tensor) -> Tensor:
        x, weight, *rest = tensors
        return lora_linear(x, weight, rest[0] if bias else None, rest[-2], rest[-1], SCALING)

    with force(lora_linear="fused"):
        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0],
        lambda x: x[:, :1].expand_as(x),
        lambda x: x[0, 0],
    ],
    ids=["tokens first", "transposed", "apart", "repeated", "one row"],
)
def test_any_strides(layout: Callable[[Tensor], Tensor]) -> None:
    """Of x, the weights and the upstream gradient."""

    def run(name: str, layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = inputs(bias=True)
        leaves = given.leaves(*NAMES)
        weight, lora_A, lora_B = (given.weight.t().contiguous().t(), given.lora_A.flip(0), given.lora_B[:, :])
        with force(lora_linear=name):
            y = lora_linear(layout(given.x), weight, given.bias, lora_A, lora_B, SCALING)
            pull = y.detach().cos().sum(-1, keepdim=True).expand_as(y)
            return [y.detach(), *torch.autograd.grad(y, leaves, pull)]

    for ours, theirs in zip(run("fused", layout), run("reference", layout), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert run("fused", layout)[0].is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "adapter"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_adapters_of_another_dtype_are_added_before_the_one_cast(dtype: torch.dtype, adapter: torch.dtype) -> None:
    """The reference's bits, which are PEFT's; every gradient has its parameter's dtype."""
    ours, theirs = (
        results(name, inputs((9,), 32, 24, bias=True, dtype=dtype, adapter=adapter), *NAMES)
        for name in ("fused", "reference")
    )
    assert torch.equal(ours[0], theirs[0])
    assert [tensor.dtype for tensor in ours[1:]] == [dtype, dtype, dtype, adapter, adapter]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
def test_bf16_is_no_further_from_float64_than_plain_operations(adapter: torch.dtype) -> None:
    """Output and gradients, over the dimensions and numbers of rows of a model."""
    given = inputs((700,), 256, 320, 16, bias=True, dtype=torch.bfloat16, adapter=adapter)
    exact = results("reference", Inputs(*(None if t is None else t.detach().double() for t in given)), *TRAINED)
    errors = {}
    for name in ("fused", "reference"):
        found = results(name, Inputs(*(None if t is None else t.detach().clone() for t in given)), *TRAINED)
        errors[name] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    for ours, plain in zip(errors["fused"], errors["reference"], strict=True):
        assert ours <= 1.02 * plain
    assert errors["fused"][0] < 4e-3


def test_a_zero_adapter_leaves_the_bits_of_the_base() -> None:
    given = inputs(bias=True, dtype=torch.float32)
    given.lora_B.zero_()
    assert torch.equal(lora_linear(*given, SCALING), torch.nn.functional.linear(given.x, given.weight, given.bias))


@pytest.mark.parametrize("name", ["fused", "reference"])
def test_autocast_takes_every_product_to_its_dtype(name: str) -> None:
    """Forward inside, backward outside; gradients come back in the parameters' dtype."""
    given = inputs((40,), 32, 24, bias=True, dtype=torch.float32, adapter=torch.float32)
    leaves = given.leaves(*NAMES)
    with torch.autocast("cpu", dtype=torch.bfloat16), force(lora_linear=name):
        y = lora_linear(*given, SCALING)
        expected = reference(*given, SCALING)
    assert y.dtype is torch.bfloat16
    pull = drawn(*y.shape, seed=9, dtype=torch.bfloat16)
    for ours, theirs in zip(
        (y, *torch.autograd.grad(y, leaves, pull)),
        (expected, *torch.autograd.grad(expected, leaves, pull)),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.detach().abs().max()))


def test_a_backward_pass_under_autocast_is_not_narrowed() -> None:
    given = inputs((8,), dtype=torch.float32)
    leaves = given.leaves(*TRAINED)
    y = lora_linear(*given, SCALING)
    plain = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(y.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_shapes_alone_go_through_the_meta_device() -> None:
    leaves = [tensor.to("meta").requires_grad_() for tensor in inputs(bias=True) if tensor is not None]
    y = lora_linear(*leaves, SCALING)
    assert [grad.shape for grad in torch.autograd.grad(y.sum(), leaves)] == [leaf.shape for leaf in leaves]


def test_gradients_survive_a_second_call_and_accumulate() -> None:
    given = inputs()
    leaves = given.leaves(*TRAINED)
    y = lora_linear(*given, SCALING)
    y.sum().backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    y.sum().backward()
    for leaf, first in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * first)


def test_checkpointed_the_gradients_are_the_same_bits() -> None:
    given = inputs()
    leaves = given.leaves(*TRAINED)
    plain = torch.autograd.grad(lora_linear(*given, SCALING).sum(), leaves)
    again = torch.autograd.grad(checkpoint(lora_linear, *given, SCALING, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_second_order_gradients_are_the_references() -> None:
    given = inputs()
    leaves = given.leaves(*TRAINED)
    with pytest.raises(UnsupportedDispatch, match="reference"):
        torch.autograd.grad(lora_linear(*given, SCALING).square().sum(), leaves, create_graph=True)
    with force(lora_linear="reference"):
        assert torch.autograd.gradgradcheck(lambda x, a, b: lora_linear(x, *given[1:3], a, b, SCALING), leaves)


# ---------------------------------------------------------------------------------------------------- what it keeps


def kept(run: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    """Shapes of the distinct tensors that autograd keeps."""
    found: dict[int, tuple[int, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), force(lora_linear="fused"):
        run()
    return sorted(found.values())


@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (("x", "lora_A", "lora_B"), [(3, 12), (7, 3), (7, 12), (50, 3), (50, 12)]),
        (("lora_A", "lora_B"), [(7, 3), (50, 3), (50, 12)]),  # the first layer behind a frozen embedding
        (("x", "lora_B"), [(3, 12), (7, 3), (7, 12), (50, 3)]),  # A frozen: x is not kept
        (("x",), [(3, 12), (7, 3), (7, 12)]),
        (("bias",), []),
    ],
)
def test_only_what_a_wanted_gradient_reads_is_kept(
    trained: tuple[str, ...], expected: list[tuple[int, ...]], adapter: torch.dtype
) -> None:
    """x as it came, also where adapters are wider; of the output's size nothing."""
    given = inputs((50,), bias=True, dtype=torch.bfloat16, adapter=adapter)
    given.leaves(*trained)
    assert kept(lambda: lora_linear(*given, SCALING)) == expected


class Fresh(TorchDispatchMode):
    """Counts new memory of at least some number of elements."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.count = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= self.least:
            self.count += out.untyped_storage().data_ptr() not in before
        return out


def test_the_only_large_buffers_are_the_results() -> None:
    """One of (N, out) forward, one of (N, in) backward."""
    given = inputs((64,), 48, 32, 3, bias=True, dtype=torch.float32)
    leaves = given.leaves(*TRAINED)
    with force(lora_linear="fused"):
        with Fresh(64 * 32) as forward:
            y = lora_linear(*given, SCALING)
        pull = torch.ones_like(y)
        with Fresh(64 * 32) as backward:
            torch.autograd.grad(y, leaves, pull)
    assert (forward.count, backward.count) == (1, 1)


# ---------------------------------------------------------------------------------------------------- which one runs


class Wrapped(Tensor):
    """As DTensor: another class."""


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (lambda x: x, {}, "fused"),
        (lambda x: x, {"dropout": 0.5}, "fused"),
        (lambda x: x, {"training": True}, "fused"),
        (lambda x: x, {"dropout": 0.5, "training": True}, "reference"),
        (lambda x: x.as_subclass(Wrapped), {}, "reference"),
    ],
)
def test_the_log_tells_what_ran(change: Callable[[Tensor], Tensor], options: dict[str, Any], expected: str) -> None:
    given = inputs()
    with record() as ran:
        lora_linear(change(given.x), *given[1:], SCALING, **options)
    assert list(ran) == [("lora_linear", expected)]


def test_a_forced_choice_that_cannot_run_says_why() -> None:
    with force(lora_linear="fused"), pytest.raises(UnsupportedDispatch, match=r"dropout = 0\.1"):
        lora_linear(*inputs(), SCALING, dropout=0.1, training=True)
    with force(lora_linear="triton"), pytest.raises(UnsupportedDispatch, match="cannot run"):
        lora_linear(*inputs(), SCALING)


# ---------------------------------------------------------------------------------------------------- compiled


@pytest.fixture
def fresh() -> Iterator[None]:
    """Graphs of other tests stay out."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("adapter", [torch.float64, torch.float32])
def test_compiles_into_one_graph_for_every_length(adapter: torch.dtype) -> None:
    """Forward and backward, without a break and with two compilations at most."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lora_linear, backend=counter, fullgraph=True)
    for length in (4, 7, 8, 30, 64):
        given = inputs((2, length), bias=True, adapter=adapter)
        leaves = given.leaves(*TRAINED)
        ours, theirs = compiled(*given, SCALING), lora_linear(*given, SCALING)
        pull = drawn(*ours.shape, seed=9)
        for one, other in zip(
            (ours, *torch.autograd.grad(ours, leaves, pull)),
            (theirs, *torch.autograd.grad(theirs, leaves, pull)),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2
