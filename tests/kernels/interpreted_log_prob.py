"""The Triton log-prob core in the interpreter (fp32) against the torch reference in float64.

Run by test_triton_interpreter.py in a process where TRITON_INTERPRET=1.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.kernels import log_prob_reference, triton_log_prob
from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.log_prob_terms import LogitMap, ScalarLoss, Setting, Wanted
from bestiary.kernels.triton_runtime import product_obstacle

from .conftest import poisoned

TOLERANCE = 1e-6  # of the largest value
IGNORED = -100


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What `torch.empty` returns is NaN."""
    with poisoned():
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and tiles, none of them full, at shapes the interpreter can walk over."""
    monkeypatch.setattr(triton_log_prob, "COLUMNS", 128)
    monkeypatch.setattr(triton_log_prob, "ROWS", 5)
    monkeypatch.setattr(triton_log_prob, "HELD_BYTES", 0)
    monkeypatch.setattr(triton_log_prob, "HELD_ROWS", (4, 8))
    monkeypatch.setattr("bestiary.kernels.triton_log_prob_tiles.BLOCK", 64)


class Inputs:
    """Hidden states, weight, bias and targets; some ignored."""

    def __init__(self, tokens: int, vocab: int, *, bias: bool = False, ignored: str = "some") -> None:
        generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
        self.hidden = torch.randn(tokens, 12, generator=generator)
        self.weight = torch.randn(vocab, 12, generator=generator)
        self.bias = torch.randn(vocab, generator=generator) if bias else None
        self.target = torch.randint(vocab, (tokens,), generator=generator)
        if ignored == "some":
            self.target[::3] = IGNORED
        elif ignored == "all":
            self.target[:] = IGNORED

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        given = [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]
        return [tensor.detach().to(dtype).requires_grad_() for tensor in given]


def setting(vocab: int, dtype: torch.dtype, logit_map: LogitMap | None = None, **wanted: Any) -> Setting:
    return Setting(logit_map or LogitMap(), Wanted(**wanted), IGNORED, dtype, vocab, None)


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    ours, exact = ours.detach().double(), exact.detach().double()
    error = float((ours - exact).abs().max()) if exact.numel() else 0.0
    assert error <= TOLERANCE * (float(exact.abs().max()) if exact.numel() else 0.0), error


def per_token(inputs: Inputs, logit_map: LogitMap | None = None, **wanted: Any) -> None:
    """Every column and every gradient of a random combination of the columns."""
    results = []
    for module, dtype in ((triton_log_prob, torch.float32), (log_prob_reference, torch.float64)):
        leaves = inputs.leaves(dtype)
        h, w, *b = leaves
        options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in wanted.items()}
        out = module.log_prob(h, w, b[0] if b else None, inputs.target, setting(len(w), dtype, logit_map, **options))
        differentiable = [column for name, column in out._asdict().items() if column is not None and name != "top1"]
        generator = torch.Generator().manual_seed(1)
        pulls = [torch.randn(len(h), generator=generator).to(dtype) for _ in differentiable]
        results.append((out, torch.autograd.grad(differentiable, leaves, pulls)))
    (ours, mine), (exact, theirs) = results
    for name in ours._fields:
        if name == "top1" and wanted.get("top1"):
            assert torch.equal(ours.top1, exact.top1)
        elif getattr(ours, name) is not None:
            assert_near(getattr(ours, name), getattr(exact, name))
    for a, b in zip(mine, theirs, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize(
    ("tokens", "vocab"), [(13, 1), (5, 63), (1, 64), (13, 65), (5, 128), (13, 257), (1, 389), (13, 389)]
)
def test_log_prob_and_lse(tokens: int, vocab: int) -> None:
    """Vocabularies around the multiples of 64 and of the tile, chunks that are not full."""
    per_token(Inputs(tokens, vocab))


@pytest.mark.parametrize(
    ("logit_map", "bias"),
    [(LogitMap(2.0, None, 0.7), False), (LogitMap(1.0, 3.0, 1.0), True), (LogitMap(0.5, 8.0, 1.3), False)],
)
def test_everything_at_once(logit_map: LogitMap, bias: bool) -> None:
    """Entropy, argmax and mean under divisor, soft cap, temperature and bias."""
    per_token(Inputs(7, 193, bias=bias), logit_map, entropy=True, top1=True, logit_mean=True)


def test_weighted_mean() -> None:
    """The mean with weights, as label smoothing with class weights asks for it."""
    weights = torch.rand(193, generator=torch.Generator().manual_seed(4))
    per_token(Inputs(7, 193), logit_mean=True, mean_weights=weights)


def test_all_ignored_is_zero_with_a_graph() -> None:
    """Exactly zero, and gradients of exactly zero."""
    inputs = Inputs(6, 70, ignored="all")
    hidden, weight = inputs.leaves(torch.float32)
    out = triton_log_prob.log_prob(hidden, weight, None, inputs.target, setting(70, torch.float32))
    of_hidden, of_weight = torch.autograd.grad(out.log_prob.sum() + out.lse.sum(), (hidden, weight))
    for tensor in (out.log_prob, out.lse, of_hidden, of_weight):
        assert not tensor.any()


def test_no_tokens() -> None:
    """An empty batch has empty results and a weight gradient of zeros."""
    inputs = Inputs(0, 70)
    hidden, weight = inputs.leaves(torch.float32)
    out = triton_log_prob.log_prob(hidden, weight, None, inputs.target, setting(70, torch.float32))
    (of_weight,) = torch.autograd.grad(out.log_prob.sum(), (weight,))
    assert out.log_prob.shape == (0,)
    assert not of_weight.any()


def test_frozen_tensors_get_no_gradient_and_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer of the weight's size for a frozen head, and none for frozen hidden states."""
    inputs, made = Inputs(6, 70, ignored="none"), []
    original = triton_log_prob.Sums.__init__

    def spy(self: Any, *args: Any) -> None:
        original(self, *args)
        made.append((self.hidden is not None, self.weight is not None))

    monkeypatch.setattr(triton_log_prob.Sums, "__init__", spy)
    for frozen in (0, 1):
        leaves = inputs.leaves(torch.float32)
        leaves[frozen].requires_grad_(False)
        out = triton_log_prob.log_prob(*leaves, None, inputs.target, setting(70, torch.float32))
        out.log_prob.sum().backward()
        assert leaves[frozen].grad is None
        assert leaves[1 - frozen].grad is not None
    assert made == [(False, True), (True, False)]


def test_sure_of_the_target_keeps_its_digits() -> None:
    """Where p → 1, log p and its gradient are far below the rounding of 1: they hold to 1e-5 of themselves."""
    weight = torch.eye(64)[:, :12].contiguous()
    hidden = torch.zeros(2, 12)
    hidden[0, 3], hidden[1, 5] = 30.0, 40.0
    target = torch.tensor([3, 5])
    hidden.requires_grad_()
    out = triton_log_prob.log_prob(hidden, weight, None, target, setting(64, torch.float32)).log_prob
    (slope,) = torch.autograd.grad(out.sum(), hidden)
    others = 63 * torch.tensor([-30.0, -40.0]).double().exp()
    assert torch.allclose(out.double(), -others.log1p(), rtol=1e-5, atol=0)
    assert torch.allclose(slope[[0, 1], target].double(), others / (1 + others), rtol=1e-5, atol=0)


@pytest.mark.parametrize("column", [0, 7, 63, 64, 130])
def test_logits_of_minus_infinity(column: int) -> None:
    """A masked logit has no mass, no gradient and makes nothing NaN."""
    inputs = Inputs(5, 131, bias=True, ignored="none")
    inputs.bias[column] = -torch.inf
    inputs.target[inputs.target == column] = (column + 1) % 131
    results = []
    for module, dtype in ((triton_log_prob, torch.float32), (log_prob_reference, torch.float64)):
        h, w, b = inputs.leaves(dtype)
        out = module.log_prob(h, w, b, inputs.target, setting(131, dtype, entropy=True, top1=True))
        results.append((out, torch.autograd.grad((out.log_prob + out.lse).sum(), (h, w, b))))
    (ours, mine), (exact, theirs) = results
    assert_near(ours.log_prob, exact.log_prob)
    assert_near(ours.entropy, exact.entropy)
    assert not mine[2][column]
    for a, b in zip(mine, theirs, strict=True):
        assert_near(a, b)


def test_equal_logits_name_the_smallest_id() -> None:
    """Ties within a tile, between tiles, and with the target."""
    hidden, weight, target = torch.ones(3, 2), torch.zeros(200, 2), torch.tensor([0, 150, 199])
    out = triton_log_prob.log_prob(hidden, weight, None, target, setting(200, torch.float32, top1=True))
    assert out.top1.tolist() == [0, 0, 0]
    weight[[70, 140, 190]] = 1.0
    out = triton_log_prob.log_prob(hidden, weight, None, target, setting(200, torch.float32, top1=True))
    assert out.top1.tolist() == [70, 70, 70]


def test_strided_and_expanded_inputs() -> None:
    """Transposed weight, hidden states out of a wider tensor, an expanded gradient."""
    inputs = Inputs(6, 70, ignored="none")
    exact = inputs.leaves(torch.float64)
    log_prob_reference.log_prob(*exact, None, inputs.target, setting(70, torch.float64)).log_prob.sum().backward()
    hidden = torch.cat((inputs.hidden, inputs.hidden), 1)[:, :12].detach().requires_grad_()
    weight = inputs.weight.T.contiguous().T.detach().requires_grad_()
    assert not weight.is_contiguous()
    triton_log_prob.log_prob(hidden, weight, None, inputs.target, setting(70, torch.float32)).log_prob.sum().backward()
    assert_near(hidden.grad, exact[0].grad)
    assert_near(weight.grad, exact[1].grad)


LOSSES = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "both": {"smoothing": 0.2, "z_loss": 0.02},
    "class weights": {"smoothing": 0.2, "z_loss": 0.02},
}
CLASSES = torch.linspace(0.3, 1.6, 193, dtype=torch.float64)


MAPS = (LogitMap(), LogitMap(2.0, None, 0.7), LogitMap(1.0, 3.0, 1.0))


@pytest.mark.parametrize(
    ("name", "logit_map"),
    [*((name, MAPS[index % 3]) for index, name in enumerate(LOSSES)), *(("both", MAPS[i]) for i in (1, 2))],
)
def test_scalar_loss(name: str, logit_map: LogitMap) -> None:
    """Value and gradients with token weights, scaled by what stands behind the loss, and a second backward call."""
    inputs, options = Inputs(11, 193, bias=True), LOSSES[name]
    share = torch.rand(11, generator=torch.Generator().manual_seed(2)) * (inputs.target != IGNORED)
    results = []
    for module, dtype in ((triton_log_prob, torch.float32), (log_prob_reference, torch.float64)):
        h, w, b = leaves = inputs.leaves(dtype)
        label, more, asked = share.to(dtype), {}, setting(193, dtype, logit_map, logit_mean="smoothing" in options)
        if name == "class weights":  # as `linear_cross_entropy` asks for them
            classes = CLASSES.to(dtype)
            label, more["mean_mass"] = label * classes[inputs.target.clamp(min=0)], classes.mean()
            asked = setting(193, dtype, logit_map, logit_mean=True, mean_weights=classes / 193)
        loss = ScalarLoss(-label * (1 - options.get("smoothing", 0.0)), share.to(dtype), **options, **more)
        value, out = module.scalar_loss(h, w, b, inputs.target, loss, asked)
        first = torch.autograd.grad(value * 3.0, leaves, retain_graph=True)
        results.append((value, out, first, torch.autograd.grad(value * 3.0, leaves)))
    (value, out, first, second), (exact, columns, theirs, _) = results
    assert_near(value, exact)
    assert_near(out.log_prob, columns.log_prob)
    assert not out.log_prob.requires_grad
    for a, b, c in zip(first, second, theirs, strict=True):
        assert_near(a, c)
        assert_near(b, c)


@pytest.mark.parametrize(
    ("vocab", "logit_map"), [(64, LogitMap(0.5, 8.0, 1.3)), (65, LogitMap(0.5, 8.0, 1.3)), (127, LogitMap())]
)
def test_padded_columns_receive_exactly_zero_gradient(
    vocab: int, logit_map: LogitMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per token and in a scalar loss, whatever bends the logits; real columns receive theirs."""
    seen: list[tuple[Any, Tensor]] = []
    original = triton_log_prob.Sums.add

    def spy(self: Any, slope: Tensor, tile: Any, *rest: Any) -> None:
        seen.append((tile, slope.clone()))
        original(self, slope, tile, *rest)

    monkeypatch.setattr(triton_log_prob.Sums, "add", spy)
    inputs, share = Inputs(6, vocab, bias=True, ignored="none"), torch.full((6,), 1 / 6)
    asked = setting(vocab, torch.float32, logit_map, entropy=True, logit_mean=True)
    out = triton_log_prob.log_prob(*inputs.leaves(torch.float32), inputs.target, asked)
    (out.log_prob + out.entropy + out.logit_mean).sum().backward()
    loss = ScalarLoss(-share, share, smoothing=0.1, z_loss=0.01)
    triton_log_prob.scalar_loss(*inputs.leaves(torch.float32), inputs.target, loss, asked)[0].backward()
    assert sum(tile.width - tile.real for tile, _ in seen) > 0 or vocab == 64
    for tile, slope in seen:
        assert not slope[:, tile.real :].any()
        assert slope[:, : tile.real].any()


def test_scalar_loss_holds_its_gradients_when_the_forward_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward call computes no product."""
    inputs = Inputs(6, 70, ignored="none")
    hidden, weight = inputs.leaves(torch.float32)
    share = torch.full((6,), 1 / 6)
    value, _ = triton_log_prob.scalar_loss(
        hidden, weight, None, inputs.target, ScalarLoss(-share, share), setting(70, torch.float32)
    )
    monkeypatch.setattr(triton_log_prob, "multiply", None)
    value.backward()
    assert weight.grad.any()


def test_second_order_is_refused() -> None:
    """By name, with the implementation that has it."""
    inputs = Inputs(3, 70, ignored="none")
    hidden, weight = inputs.leaves(torch.float32)
    out = triton_log_prob.log_prob(hidden, weight, None, inputs.target, setting(70, torch.float32))
    with pytest.raises(UnsupportedDispatch, match="second-order"):
        torch.autograd.grad(out.log_prob.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("forced", [None, "triton"])
def test_the_public_function_runs_it(forced: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """First choice where it can run; anything else where it cannot."""
    calls = []
    original = triton_log_prob.log_prob
    monkeypatch.setattr(triton_log_prob, "log_prob", lambda *given: calls.append(1) or original(*given))
    inputs = Inputs(4, 70)
    with force(log_prob=forced) if forced else nullcontext():
        linear_log_prob(inputs.hidden, inputs.weight, inputs.target)
    linear_log_prob(inputs.hidden.double(), inputs.weight.double(), inputs.target)
    assert len(calls) == 1


def test_what_it_cannot_do_has_a_reason() -> None:
    """float16 gradients, two dtypes, float64."""
    x = torch.zeros(2, 4)
    assert product_obstacle(x, x, None) is None
    assert "underflow" in str(product_obstacle(x.half(), x.half(), None))
    assert "one dtype" in str(product_obstacle(x, x.double(), None))
    assert "fp32" in str(product_obstacle(x.double(), x.double(), None))


@pytest.mark.parametrize(("tokens", "vocab", "size"), [(8192, 151936, 1280), (8192, 201088, 1024), (100, 64, 100)])
def test_chunks_on_the_compute_roof(tokens: int, vocab: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 1024 tokens in bfloat16 at the launch models' vocabularies, within half a gigabyte."""
    monkeypatch.undo()
    chunks = triton_log_prob.chunks_of(tokens, vocab, torch.bfloat16, held=True)
    assert chunks[0] == slice(0, size)
    assert chunks[-1].stop == tokens
    logits = size * min(triton_log_prob.COLUMNS, vocab) * 4
    assert size * vocab * 2 + logits <= 500e6


@pytest.mark.parametrize("add", [False, True])
def test_products_of_bfloat16_ask_for_sums_in_fp32(add: bool) -> None:
    """The operator that CUDA has and the CPU has not accepts the arguments (on meta tensors), sum and out being one."""
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 4), (4, 8)))
    out = torch.empty(6, 8, device="meta")
    triton_log_prob.multiply(a, b, out, add=add)
    assert out.dtype == torch.float32


def _wide_products(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """What cuBLAS computes: exact products of narrow numbers, summed in the dtype of `out`."""
    product = a.to(out.dtype) @ b.to(out.dtype)
    out.copy_(out + product if add else product)


def _bfloat16_errors(scalar: bool) -> list[float]:
    """Of dX and dW against float64, as multiples of what rounding these to bfloat16 costs; log p is checked too."""
    inputs, results = Inputs(40, 389), []
    inputs.hidden, inputs.weight = inputs.hidden.bfloat16(), inputs.weight.bfloat16()
    share = (inputs.target != IGNORED) / 40.0
    for module, dtype in ((triton_log_prob, torch.bfloat16), (log_prob_reference, torch.float64)):
        leaves, wide = inputs.leaves(dtype), torch.promote_types(dtype, torch.float32)
        if scalar:
            loss = ScalarLoss(-share.to(wide), share.to(wide))
            value, out = module.scalar_loss(*leaves, None, inputs.target, loss, setting(389, wide))
        else:
            out = module.log_prob(*leaves, None, inputs.target, setting(389, wide))
            value = (-share.to(wide) * out.log_prob).sum()
        results.append((out.log_prob, torch.autograd.grad(value, leaves)))
    (ours, mine), (exact, theirs) = results
    assert_near(ours, exact)
    return [
        float((a.double() - b).norm() / (b.bfloat16().double() - b).norm()) for a, b in zip(mine, theirs, strict=True)
    ]


@pytest.mark.parametrize("scalar", [False, True])
def test_bfloat16_does_not_depend_on_the_number_of_chunks(scalar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and sums in fp32: log p is exact to fp32; gradients cost a few roundings in one chunk or in eight.

    The interpreter gets products of bfloat16 wrong, so these are the CPU's here, and it cuts digits off where a GPU
    rounds to nearest: twice the error, hence 6 roundings and not 3.
    """
    monkeypatch.setattr(triton_log_prob, "multiply", _wide_products)
    many = _bfloat16_errors(scalar)
    for name, size in (("ROWS", 64), ("HELD_ROWS", (64, 64)), ("COLUMNS", 384)):
        monkeypatch.setattr(triton_log_prob, name, size)
    for in_many, in_one in zip(many, _bfloat16_errors(scalar), strict=True):
        assert in_many <= 1.05 * in_one
        assert in_one <= 6.0
