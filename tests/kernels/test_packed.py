"""Packed weights give the same products, never those of a weight that has changed, and are gone with their block."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.kernels import packed
from bestiary.kernels.dispatch import force
from bestiary.kernels.head import head_logits
from bestiary.kernels.linear import ROWS, linear
from bestiary.kernels.lora_linear import lora_linear
from bestiary.kernels.packed import USES, packed_weights

needs_onednn = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="oneDNN's products need AVX2"
)
BATCH = 5
pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def setting(dtype: torch.dtype = torch.float32, outer: int = 67, inner: int = 96) -> tuple[Tensor, nn.Parameter]:
    """x (BATCH, 1, inner), weight (outer, inner)."""
    generator = torch.Generator().manual_seed(outer)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((BATCH, 1, inner), (outer, inner)))
    return x.to(dtype), nn.Parameter(weight.to(dtype))


def expect(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The product in float64, to the rounding of its dtype."""
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    unit = torch.finfo(found.dtype).eps
    assert found.shape == truth.shape
    assert found.is_contiguous()
    assert (found - truth).abs().max() < 4 * unit * truth.abs().max()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_the_weight(dtype: torch.dtype, with_bias: bool, copies: list[object]) -> None:
    """Three of them read one copy."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no products of bf16")
    x, weight = setting(dtype)
    bias = nn.Parameter(torch.arange(67.0).to(dtype)) if with_bias else None
    with packed_weights(uses=USES, rows=BATCH):
        for factor in (1, 2, 3):
            expect(linear(factor * x, weight, bias), factor * x, weight, bias)
    assert len(copies) == 1


def test_more_rows_read_the_weight_where_it_lies_and_fewer_the_copy(copies: list[object]) -> None:
    """A prompt is not what the block is for; answers end one after the other."""
    x, weight = setting()
    with packed_weights(uses=USES, rows=BATCH):
        for more in (torch.cat((x, x)), x.expand(BATCH, ROWS, 96)):
            expect(linear(more, weight), more, weight)
        assert not copies
        for fewer in (x[:-1], x[:2]):
            expect(linear(fewer, weight), fewer, weight)
    assert len(copies) == 1


UNFIT: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "float64": lambda: setting(torch.float64),
    "not a parameter": lambda: (setting()[0], setting()[1].detach()),
    "made anew": lambda: (setting()[0], F.pad(setting()[1], (0, 0, 0, 1))),
    "larger than what is left": lambda: setting(outer=68),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_not_packed_has_the_bits_of_before(
    name: str, copies: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of temporaries would pile up; memory has a limit."""
    x, weight = UNFIT[name]()
    monkeypatch.setattr(packed, "BYTES", 4 * 67 * 96)
    before = linear(x, weight)
    with packed_weights(uses=USES, rows=BATCH):
        assert torch.equal(linear(x, weight), before)
    assert not copies


def test_few_uses_are_not_worth_it_and_gradients_forbid_it(copies: list[object]) -> None:
    """Neither fewer products than packing costs, nor a graph, nor a forced choice of torch."""
    x, weight = setting()
    with packed_weights(uses=USES - 1, rows=BATCH):
        linear(x, weight)
    with packed_weights(uses=USES, rows=BATCH):
        with torch.enable_grad():
            linear(x, weight).sum().backward()
        with force(linear="torch"):
            linear(x, weight)
    assert weight.grad is not None
    assert not copies


def test_one_row_in_fp32_is_not_packed(copies: list[object]) -> None:
    """It has nothing to gain."""
    x, weight = setting()
    with packed_weights(uses=USES, rows=1):
        linear(x[:1], weight)
    assert not copies


# ------------------------------------------------------------------------------------------------ stale weights


def _swap_twice(weight: nn.Parameter) -> None:
    """Back to a place that was free in between, were the copy's source not held."""
    weight.data = weight.detach().clone()
    weight.data = weight.detach() * 3


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda w: w.mul_(3),
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
    "one number": lambda w: w[3].fill_(7.0),
    "through detach": lambda w: w.detach().mul_(3),
    "in inference mode": lambda w: torch.inference_mode()(lambda: w.mul_(3))(),
    "another storage": lambda w: setattr(w, "data", w.detach() * 3),
    "two other storages": _swap_twice,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_weight_that_changes_is_never_stale(name: str, copies: list["weakref.ref[Tensor]"]) -> None:
    """Before and after the change, and after a second one."""
    x, weight = setting()
    with packed_weights(uses=USES, rows=BATCH):
        for _ in range(2):
            expect(linear(x, weight), x, weight)
            WRITES[name](weight)
            expect(linear(x, weight), x, weight)
    assert copies
    assert all(copy() is None for copy in copies)


def test_an_optimiser_s_step_is_seen() -> None:
    """Fused updates count as writes too."""
    x, weight = setting()
    weight.grad = torch.ones_like(weight)
    with packed_weights(uses=USES, rows=BATCH):
        for fused in (False, True):
            linear(x, weight)
            torch.optim.AdamW([weight], lr=0.1, fused=fused).step()
            expect(linear(x, weight), x, weight)


def test_an_address_is_not_given_to_another_weight() -> None:
    """A model that dies inside the block leaves its place to the next one, whose versions are the same."""
    with packed_weights(uses=USES, rows=BATCH):
        for seed in range(8):
            x, weight = setting(outer=64)
            weight = nn.Parameter(weight + seed)
            expect(linear(x, weight), x, weight)
            del weight


# ------------------------------------------------------------------------------------------------ end of the block


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_copies_go_with_their_block(error: type[BaseException] | None, copies: list["weakref.ref[Tensor]"]) -> None:
    """However it ends."""
    x, weight = setting()
    with nullcontext() if error is None else suppress(error), packed_weights(uses=USES, rows=BATCH):
        linear(x, weight)
        assert copies[0]() is not None
        if error is not None:
            raise error
    assert copies[0]() is None
    linear(x, weight)
    assert len(copies) == 1


def test_memory_that_runs_out_while_packing_takes_no_copy_along(
    copies: list["weakref.ref[Tensor]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps the error, and with it the frames it went through, keeps no copies."""
    x, weight = setting()
    pack = packed._pack

    def full(weight: Tensor) -> Tensor:
        if copies:
            raise MemoryError
        return pack(weight)

    def two_products() -> None:
        with packed_weights(uses=USES, rows=BATCH):
            linear(x, weight)
            linear(x, nn.Parameter(weight + 1))

    monkeypatch.setattr(packed, "_pack", full)
    with pytest.raises(MemoryError) as kept:
        two_products()
    assert kept.tb is not None
    assert [copy() is None for copy in copies] == [True]


def test_blocks_inside_blocks_and_beside_them_keep_their_own(copies: list["weakref.ref[Tensor]"]) -> None:
    """The inner one and the other thread end without a change to the outer one."""
    x, weight = setting()

    def inner(uses: int) -> None:
        with torch.no_grad(), packed_weights(uses=uses, rows=BATCH):
            linear(x, weight)

    with packed_weights(uses=USES, rows=BATCH):
        linear(x, weight)
        inner(USES)
        inner(0)
        for job in (lambda: inner(USES), lambda: inner(0)):
            thread = threading.Thread(target=job)
            thread.start()
            thread.join()
        linear(x, weight)
        assert [copy() is None for copy in copies] == [False, True, True]


# ------------------------------------------------------------------------------------------------ who takes part


def test_a_linear_layer_with_an_adapter_reads_a_packed_base(copies: list[object]) -> None:
    """The low-rank part stays as it is."""
    x, weight = setting()
    low, high = nn.Parameter(torch.randn(4, 96)), nn.Parameter(torch.randn(67, 4))
    with packed_weights(uses=USES, rows=BATCH):
        found = lora_linear(x, weight, None, low, high, 0.5)
    expect(found, x, weight.double() + 0.5 * high.double() @ low.double())
    assert len(copies) == 1


def test_of_a_ragged_head_the_whole_part_is_packed_once(copies: list[object]) -> None:
    """The padded tile is made anew for each product."""
    x, weight = setting(outer=3 * 64 + 5)
    with packed_weights(uses=USES, rows=BATCH):
        for _ in range(3):
            expect(head_logits(x, weight), x, weight)
    assert len(copies) == 1


def test_a_compiled_graph_holds_a_plain_product(copies: list[object]) -> None:
    """The compiler's choice stands."""
    x, weight = setting()
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    with packed_weights(uses=USES, rows=BATCH):
        assert torch.equal(compiled(x, weight), F.linear(x, weight))
    assert not copies
