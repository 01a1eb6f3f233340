"""Few rows run in oneDNN, and nobody can tell but by the clock."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.dispatch import force, record
from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.linear import ROWS, linear

FAST = [("linear", "onednn" if torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"} else "torch")]
PLAIN = [("linear", "torch")]


def setting(*rows: int, inner: int = 96, outer: int = 67, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x (*rows, inner), weight (outer, inner), bias (outer,)."""
    generator = torch.Generator().manual_seed(inner)
    shapes = (*rows, inner), (outer, inner), (outer,)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [(), (1,), (7,), (16, 1), (2, 3, 4), (ROWS,)], ids=str)
@torch.no_grad()
def test_few_rows_are_those_of_the_plain_product(rows: tuple[int, ...], with_bias: bool) -> None:
    """To the rounding of fp32, in contiguous memory."""
    x, weight, bias = setting(*rows)
    given = bias if with_bias else None
    with record() as log:
        ours = linear(x, weight, given)
    assert log == FAST
    expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
    assert ours.shape == (*rows, 67)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-5)


@torch.no_grad()
def test_rows_may_have_any_strides() -> None:
    """The last token of every row, as the head sees it."""
    x, weight, bias = setting(3, 5)
    last = x[:, -1]
    assert not last.is_contiguous()
    torch.testing.assert_close(linear(last, weight, bias), F.linear(last.contiguous(), weight, bias))


@torch.no_grad()
def test_a_weight_that_is_written_is_seen() -> None:
    """Nothing derived from the weight is kept."""
    x, weight, _ = setting(4)
    first = linear(x, weight)
    weight.mul_(2)
    torch.testing.assert_close(linear(x, weight), 2 * first)


def test_with_gradients_it_is_the_plain_product() -> None:
    """Bits, gradients, and gradients of gradients."""
    x, weight, bias = (tensor.requires_grad_() for tensor in setting(5))
    with record() as log:
        ours = linear(x, weight, bias)
    assert log == PLAIN
    assert torch.equal(ours, F.linear(x, weight, bias))
    assert ours.requires_grad
    wide = [tensor.requires_grad_() for tensor in setting(5, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(linear, wide, fast_mode=True)


UNFIT: dict[str, Callable[..., Any]] = {
    "many rows": lambda: setting(ROWS + 1),
    "no rows": lambda: setting(0),
    "float64": lambda: setting(3, dtype=torch.float64),
    "bfloat16": lambda: setting(3, dtype=torch.bfloat16),
    "transposed weight": lambda: (setting(3)[0], setting(3)[1].t().contiguous().t()),
    "subclass": lambda: (setting(3)[0], setting(3)[1].as_subclass(type("Wrapped", (Tensor,), {}))),
}


@pytest.mark.parametrize("name", UNFIT)
@torch.no_grad()
def test_what_onednn_is_not_for_runs_in_torch(name: str) -> None:
    """The same bits as without us; forcing it says why not."""
    inputs = UNFIT[name]()
    with record() as log:
        ours = linear(*inputs)
    assert log == PLAIN
    assert torch.equal(ours, F.linear(*inputs))
    with force(linear="onednn"), pytest.raises(UnsupportedDispatch, match="onednn"):
        linear(*inputs)


@pytest.mark.parametrize(
    "way", [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.backends.mkldnn.flags(enabled=False)]
)
@torch.no_grad()
def test_torch_s_own_switches_hold(way: Callable[[], Any]) -> None:
    """Autocast narrows the product; who switches oneDNN off does not get it."""
    x, weight, bias = setting(3)
    with way(), record() as log:
        ours = linear(x, weight, bias)
        expected = F.linear(x, weight, bias)
    assert log == PLAIN
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_graph_holds_a_plain_product(grad: bool) -> None:
    """Inductor makes its own choice."""
    x, weight, bias = setting(3)
    with nullcontext() if grad else torch.no_grad():
        compiled = torch.compile(linear, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, weight, bias), F.linear(x, weight, bias))
