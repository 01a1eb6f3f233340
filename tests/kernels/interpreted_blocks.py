"""Triton's norm, RoPE, activations and MXFP4 in the interpreter (fp32) against the torch reference in float64.

Run by test_triton_interpreter.py in a process where TRITON_INTERPRET=1.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bestiary.bridges.mxfp4 import dequantize as torch_dequantize
from bestiary.kernels.activation import clamped_swiglu, gated
from bestiary.kernels.dispatch import record
from bestiary.kernels.errors import InvalidArgument, UnsupportedDispatch
from bestiary.kernels.lora_linear import lora_linear
from bestiary.kernels.norm import rms_norm
from bestiary.kernels.rope import apply_rope
from bestiary.kernels.triton_activation import clamped_swiglu as triton_clamped_swiglu
from bestiary.kernels.triton_activation import gated as triton_gated
from bestiary.kernels.triton_mxfp4 import dequantize as triton_dequantize
from bestiary.kernels.triton_norm import rms_norm as triton_rms_norm
from bestiary.kernels.triton_rope import apply_rope as triton_apply_rope

TOLERANCE = 1e-6  # of the largest value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    ours, exact = ours.detach().double(), exact.detach().double()
    error = float((ours - exact).abs().max()) if exact.numel() else 0.0
    assert error <= TOLERANCE * (float(exact.abs().max()) if exact.numel() else 0.0), error


def assert_same(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor | None = None
) -> None:
    """Values and all gradients; the inputs keep their strides."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, expected = ours(*leaves), exact(*wide)
    assert_near(out, expected)
    pull = normal(*out.shape, seed=9) if upstream is None else upstream
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, pull), torch.autograd.grad(expected, wide, pull.double()), strict=True
    ):
        assert_near(mine, theirs)


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers in another memory layout."""
    if how == "rows of a wider tensor":
        return torch.cat((x, x), -1)[..., : x.shape[-1]].detach()
    if how == "last axis apart":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2).detach()
    return x.detach()


LAYOUTS = ["dense", "rows of a wider tensor", "last axis apart"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 64), (2, 4, 129), (0, 4, 8), (5, 3, 3)])
@pytest.mark.parametrize(("plus_one", "scale_then_cast"), [(False, False), (False, True), (True, True), (True, False)])
def test_norm(shape: tuple[int, ...], layout: str, plus_one: bool, scale_then_cast: bool) -> None:
    """All casting orders and the offset; rows that fill no block."""

    def with_options(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: function(x, w, 1e-5, plus_one=plus_one, scale_then_cast=scale_then_cast)

    inputs = [strided(normal(*shape), layout), normal(shape[-1], seed=1)]
    assert_same(with_options(triton_rms_norm), with_options(rms_norm), inputs)


def test_norm_backward_with_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program walks over several blocks of rows, and the last block is not full."""
    monkeypatch.setattr("bestiary.kernels.triton_norm._PROGRAMS", 2)
    inputs = [normal(67, 100), normal(100, seed=1)]
    assert_same(lambda x, w: triton_rms_norm(x, w, 1e-6), lambda x, w: rms_norm(x, w, 1e-6), inputs)


def test_norm_of_a_frozen_weight_has_no_gradient_for_it() -> None:
    """The partial sums are not computed."""
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1)
    triton_rms_norm(x, weight, 1e-6).sum().backward()  # an expanded gradient
    wide = x.detach().double().requires_grad_()
    rms_norm(wide, weight.double(), 1e-6).sum().backward()
    assert weight.grad is None
    assert_near(x.grad, wide.grad)


def test_norm_refuses_rows_that_no_program_holds() -> None:
    """They would spill."""
    with pytest.raises(UnsupportedDispatch, match="8192"):
        triton_rms_norm(torch.ones(1, 8193), torch.ones(8193), 1e-6)


@pytest.mark.parametrize("layout", ["dense", "heads after tokens", "last axis apart"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "head_dim", "turning", "positions"),
    [(2, 3, 5, 8, 8, 2), (2, 3, 5, 10, 6, 1), (1, 17, 1, 64, 64, 1), (3, 1, 4, 20, 12, 3), (2, 3, 0, 8, 8, 1)],
)
def test_rope(
    batch: int, heads: int, tokens: int, head_dim: int, turning: int, positions: int, interleaved: bool, layout: str
) -> None:
    """Both pairings, a part of the head, a position vector of each row or one for all."""
    x = normal(batch, heads, tokens, head_dim)
    if layout == "heads after tokens":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "last axis apart":
        x = strided(x, layout)
    angle = normal(positions, tokens, turning // 2, seed=1) * 3
    cos, sin = angle.cos(), angle.sin()
    assert_same(
        lambda x: triton_apply_rope(x, cos, sin, interleaved=interleaved),
        lambda x: apply_rope(x, cos.double(), sin.double(), interleaved=interleaved),
        [x],
    )


def test_rope_of_an_expanded_gradient() -> None:
    """sum() hands back a tensor without strides."""
    angle = normal(1, 5, 4, seed=1)
    x = normal(2, 3, 5, 8)
    assert_same(
        lambda x: triton_apply_rope(x, angle.cos(), angle.sin()),
        lambda x: apply_rope(x, angle.double().cos(), angle.double().sin()),
        [x],
        torch.ones(()).expand(2, 3, 5, 8),
    )


def test_rope_refuses_angles_that_learn() -> None:
    """Their gradient would be silently missing."""
    angle = normal(1, 5, 4)
    with pytest.raises(UnsupportedDispatch, match="cos and sin"):
        triton_apply_rope(normal(2, 3, 5, 8), angle.cos().requires_grad_(), angle.sin())


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1025), (0, 4), (2, 3)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated(activation: str, shape: tuple[int, ...]) -> None:
    """Gate and up as the halves of one projection."""
    both = normal(*shape[:-1], 2 * shape[-1]) * 3
    inputs = [half.detach() for half in both.chunk(2, -1)]
    assert_same(lambda g, u: triton_gated(g, u, activation), lambda g, u: gated(g, u, activation), inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clamped_swiglu(layout: str) -> None:
    """Beyond the limits on every side; the clamped side has no gradient."""
    gate, up = (strided(normal(6, 40, seed=seed) * 4, layout) for seed in (0, 1))
    assert (gate > 3).any()
    assert (gate < -3).any()
    assert (up.abs() > 3).any()
    assert_same(
        lambda g, u: triton_clamped_swiglu(g, u, 1.7, 3.0), lambda g, u: clamped_swiglu(g, u, 1.7, 3.0), [gate, up]
    )


def test_gated_far_from_zero_is_finite() -> None:
    """Sigmoids of ±200 and no NaN in the gradients."""
    gate = torch.tensor([[-200.0, -50.0, 0.0, 50.0, 200.0]])
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        assert_same(
            lambda g, u, activation=activation: triton_gated(g, u, activation),
            lambda g, u, activation=activation: gated(g, u, activation),
            [gate.clone(), torch.full((1, 5), 2.0)],
        )


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (2, 0), (7, 9, 11)])
def test_mxfp4_is_exact(shape: tuple[int, ...]) -> None:
    """Every byte and every scale from 0 to 252."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(253, shape, generator=generator, dtype=torch.uint8)
    if scales.numel() > 300:
        scales.view(-1)[:253] = torch.arange(253, dtype=torch.uint8)
    assert torch.equal(triton_dequantize(blocks, scales, dtype=torch.float32), torch_dequantize(blocks, scales).float())


def test_mxfp4_refuses_other_shapes_and_dtypes() -> None:
    """Named before anything is read."""
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="do not fit"):
        triton_dequantize(blocks, scales[:1])
    with pytest.raises(InvalidArgument, match="uint8"):
        triton_dequantize(blocks.int(), scales)


@pytest.mark.parametrize(
    ("shape", "out", "rank"),
    [((5,), 7, 3), ((2, 70), 131, 16), ((9,), 1, 1), ((0,), 4, 2), ((3, 43), 300, 33)],
)
@pytest.mark.parametrize("width", [0, 1, 64, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_lora_linear(shape: tuple[int, ...], width: int, out: int, rank: int, bias: bool) -> None:
    """Tiles that are not full in any dimension; gradients of x through the same kernel, transposed."""
    scale = max(width, 1) ** -0.5

    def split(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, a, b, *rest: function(x, w, rest[0] if rest else None, a, b, 1.5)

    inputs = [normal(*shape, width), normal(out, width, seed=1) * scale, normal(rank, width, seed=2) * scale]
    inputs += [normal(out, rank, seed=3)] + ([normal(out, seed=4)] if bias else [])
    with record() as ran:
        assert_same(split(lora_linear), split(lora_linear), inputs)
    assert [name for _, name in ran] == ["triton", "fused"]  # in fp32 and, the exact one, in float64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_linear_of_any_strides(layout: str) -> None:
    """Of x, the weight and the adapter."""
    inputs = [strided(tensor, layout) for tensor in (normal(6, 40), normal(9, 40), normal(4, 40), normal(9, 4))]
    run = lambda x, w, a, b: lora_linear(x, w, None, a, b, 0.5)  # noqa: E731
    assert_same(run, run, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_refused_here(dtype: torch.dtype) -> None:
    """float64 is the torch implementation's; the interpreter's bfloat16 is not the GPU's."""
    x = normal(2, 8).to(dtype)
    for call in (lambda: triton_rms_norm(x, x[0], 1e-6), lambda: triton_gated(x, x, "silu")):
        with pytest.raises(UnsupportedDispatch, match="cannot run"):
            call()


def test_the_public_functions_run_it() -> None:
    """First choice where it can run, and the log tells; float64 goes to torch."""
    x, angle = normal(2, 3, 5, 8), normal(1, 5, 4)
    for dtype, expected in ((torch.float32, "triton"), (torch.float64, "torch")):
        wide, turn = x.to(dtype), angle.to(dtype)
        with record() as ran:
            rms_norm(wide, wide[0, 0, 0], 1e-6)
            apply_rope(wide, turn.cos(), turn.sin())
            gated(wide, wide, "silu")
            clamped_swiglu(wide, wide, 1.7, 7.0)
        assert ran == [(name, expected) for name in ("norm", "rope", "activation", "activation")]
