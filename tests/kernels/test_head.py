"""The head computes in multiples of 64 columns, and nobody can tell."""

import pytest
import torch
import torch.nn.functional as F

from bestiary.kernels.dispatch import record
from bestiary.kernels.head import TILE, head_logits

VOCABULARIES = [1, 63, 64, 65, 1003, 1024]


ROWS = [3, 50]  # of two sequences: few and many have products of their own


def setting(vocab: int, dtype: torch.dtype = torch.float64, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(2, rows, 20, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), torch.randn(vocab, 20, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logits_are_those_of_a_plain_linear(vocab: int, rows: int) -> None:
    """Values, shape, and memory without gaps."""
    hidden, weight = setting(vocab, rows=rows)
    logits = head_logits(hidden, weight)
    torch.testing.assert_close(logits, F.linear(hidden, weight), rtol=1e-13, atol=1e-13)
    assert logits.shape == (2, rows, vocab)
    assert logits.is_contiguous()
    assert logits.untyped_storage().nbytes() == logits.numel() * logits.element_size(), "no padded columns behind"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_product_has_a_multiple_of_64_columns(vocab: int, rows: int) -> None:
    """That is what the tile is for."""
    columns = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is F.linear:
                columns.append(args[1].shape[0])
            if func is torch.mm:
                columns.append(args[1].shape[1])
            return func(*args, **(kwargs or {}))

    hidden, weight = setting(vocab, rows=rows)
    with Spy():
        head_logits(hidden, weight)
    assert sum(columns) == -(-vocab // TILE) * TILE
    assert all(count % TILE == 0 for count in columns)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_gradients_are_those_of_a_plain_linear(vocab: int, rows: int) -> None:
    """The weight's gradient has the weight's shape and holds nothing of the padding."""
    (hidden, weight), (hidden2, weight2) = setting(vocab, rows=rows), setting(vocab, rows=rows)
    for leaf in (hidden, weight, hidden2, weight2):
        leaf.requires_grad_()
    head_logits(hidden, weight, divisor=1.7, softcap=2.5).square().sum().backward()
    (2.5 * torch.tanh(F.linear(hidden2, weight2) / 1.7 / 2.5)).square().sum().backward()
    torch.testing.assert_close(weight.grad, weight2.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, hidden2.grad, rtol=1e-12, atol=1e-12)
    assert weight.grad.shape == (vocab, 20)
    assert torch.autograd.gradcheck(
        lambda h, w: head_logits(h, w, divisor=1.7, softcap=2.5), (hidden, weight), fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caps_and_divisor_run_in_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    """÷ divisor, ÷ cap, tanh, × cap, each rounded as transformers' Gemma and Granite round it."""
    hidden, weight = setting(1024, dtype)
    plain = F.linear(hidden, weight)
    capped = head_logits(hidden, weight, divisor=1.7, softcap=2.5)
    assert capped.dtype == dtype
    assert torch.equal(capped, torch.tanh(plain / 1.7 / 2.5) * 2.5)
    assert not torch.equal(capped, plain)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@torch.no_grad()
def test_the_few_rows_of_a_decoding_step_run_as_few_rows(vocab: int) -> None:
    """Whole and ragged part through `kernels.linear`, to the rounding of fp32, in memory of their own."""
    hidden, weight = setting(vocab, torch.float32)
    with record() as log:
        logits = head_logits(hidden, weight, softcap=2.5)
    assert {operation for operation, _ in log} == {"linear"}
    expected = 2.5 * torch.tanh(F.linear(hidden.double(), weight.double()) / 2.5)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert logits.is_contiguous()
    assert logits.untyped_storage().nbytes() == logits.numel() * logits.element_size()
