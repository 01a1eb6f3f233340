"""Cross entropy on the log-prob core against torch's on all logits."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import InvalidArgument, LabelOutOfRange, UnsupportedDispatch
from bestiary.kernels.log_prob import linear_log_prob

from .naive_head import MAPS, case, naive, naive_loss

VOCAB, TOKENS = 67, 9
DOUBLE = {"rtol": 1e-11, "atol": 1e-12}


def weights(count: int, seed: int) -> Tensor:
    """Positive, none like another."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64) + 0.25


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.13},
    "smoothing alone": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.02},
    "token weights": {"token_weights": weights(TOKENS, 1)},
    "class weights": {"class_weights": weights(VOCAB, 2)},
    "class weights and smoothing": {"class_weights": weights(VOCAB, 2), "label_smoothing": 0.13},
    "token weights and smoothing": {"token_weights": weights(TOKENS, 1), "label_smoothing": 0.13},
    "token weights and z-loss": {"token_weights": weights(TOKENS, 1), "z_loss": 0.02},
    "token and class weights": {"token_weights": weights(TOKENS, 1), "class_weights": weights(VOCAB, 2)},
    "class weights and z-loss": {"class_weights": weights(VOCAB, 2), "z_loss": 0.02},
    "smoothing and z-loss": {"label_smoothing": 0.13, "z_loss": 0.02},
    "all": {
        "token_weights": weights(TOKENS, 1),
        "class_weights": weights(VOCAB, 2),
        "label_smoothing": 0.13,
        "z_loss": 0.02,
    },
}


def gradients(
    function: Any, arguments: tuple[Any, ...], upstream: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Loss and gradients of hidden, weight and bias."""
    hidden, weight, target, bias = arguments
    loss = function(hidden, weight, target, bias=bias, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias), upstream)]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("logit_map", MAPS)
def test_every_option_changes_the_loss_as_in_torch(logit_map: str, loss: str, reduction: str) -> None:
    """Value and gradients, alone and together, under every way of making logits."""
    options = {**MAPS[logit_map], **LOSSES[loss], "reduction": reduction}
    arguments = case(TOKENS, VOCAB).leaves()
    upstream = weights(TOKENS, 3) if reduction == "none" else torch.tensor(0.7, dtype=torch.float64)
    ours, expected = (gradients(f, arguments, upstream, **options) for f in (linear_cross_entropy, naive_loss))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)
    if loss != "plain":
        plain = naive_loss(*arguments[:3], bias=arguments.bias, **MAPS[logit_map], reduction=reduction)
        assert not torch.allclose(ours[0], plain, rtol=1e-6), "the option does something"


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("logit_map", MAPS)
def test_gradcheck(logit_map: str, loss: str, reduction: str) -> None:
    """Numerical derivatives of every option and every pair of them, in float64."""
    hidden, weight, target, bias = case(TOKENS, VOCAB).leaves()

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {**MAPS[logit_map], **LOSSES[loss], "reduction": reduction}
        return linear_cross_entropy(hidden, weight, target, bias=bias, **options)

    assert torch.autograd.gradcheck(run, (hidden, weight, bias), fast_mode=True)


@given(st.integers(0, 7), st.integers(1, 130), st.integers(0, 2**16), st.sampled_from([0.0, 0.5]))
def test_any_size(tokens: int, vocab: int, seed: int, ignored: float) -> None:
    """No tokens and one, one word and more than a tile, both torch implementations; nothing to predict is exactly 0."""
    arguments = case(tokens, vocab, seed, ignored).leaves()
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}
    expected = gradients(naive_loss, arguments, reduction="sum", **options)
    items = max(int((arguments.target != -100).sum()), 1)
    for name in ("chunked", "reference"):
        with force(log_prob=name):
            ours = gradients(linear_cross_entropy, arguments, **options)
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b / items, **DOUBLE)


# ---------------------------------------------------------------------- normalisation and upstream gradients


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_of_unequal_size_are_one_batch(micro_batches: int) -> None:
    """Losses add up to that of the whole, and gradients too, when each is divided by the targets of all."""
    arguments = case(11, VOCAB)
    whole = gradients(linear_cross_entropy, arguments.leaves())
    items = int((arguments.target != -100).sum())
    parts = []
    for rows in torch.arange(11).tensor_split([1] if micro_batches == 2 else [2, 3]):
        hidden, weight, target, bias = arguments
        part = type(arguments)(hidden[rows], weight, target[rows], bias).leaves()
        parts.append(gradients(linear_cross_entropy, part, num_items=items))
    assert len({int((arguments.target[rows] != -100).sum()) for rows in torch.arange(11).tensor_split([1])}) == 2
    loss, of_hidden, of_weight, of_bias = zip(*parts, strict=True)
    joined = [sum(loss), torch.cat(of_hidden), sum(of_weight), sum(of_bias)]
    for a, b in zip(joined, whole, strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("items", [7, 7.0, torch.tensor(7), torch.tensor(7.0)], ids=repr)
def test_num_items_may_be_a_number_or_a_tensor(items: Any) -> None:
    arguments = case(TOKENS, VOCAB).leaves()
    ours = gradients(linear_cross_entropy, arguments, num_items=items)
    for a, b in zip(ours, gradients(naive_loss, arguments, num_items=7), strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("scale", [0.25, -3.0, 0.0])
def test_whatever_follows_the_loss_is_honoured(scale: float) -> None:
    """(loss / 4).backward() gives a quarter, and a loss that counts for nothing gives zeros."""
    arguments = case(TOKENS, VOCAB).leaves()
    hidden, weight, target, bias = arguments
    one = gradients(linear_cross_entropy, arguments)
    (scale * linear_cross_entropy(hidden, weight, target, bias=bias)).backward()
    for tensor, gradient in zip((hidden, weight, bias), one[1:], strict=True):
        torch.testing.assert_close(tensor.grad, scale * gradient, **DOUBLE)


@pytest.mark.usefixtures("core")
def test_every_backward_call_on_a_kept_graph_gives_its_own_gradients() -> None:
    """The first result is not touched by the second, whatever their scales, and a freed graph says so."""
    arguments = case(TOKENS, VOCAB).leaves()
    hidden, weight, target, bias = arguments
    expected = gradients(naive_loss, arguments)[1:]
    loss = linear_cross_entropy(hidden, weight, target, bias=bias)
    calls = [
        torch.autograd.grad(loss, (hidden, weight, bias), torch.tensor(scale, dtype=torch.float64), retain_graph=True)
        for scale in (1.0, 0.5, 1.0)
    ]
    for scale, call in zip((1.0, 0.5, 1.0), calls, strict=True):
        for a, b in zip(call, expected, strict=True):
            torch.testing.assert_close(a, scale * b, **DOUBLE)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("loss", ["plain", "all"])
def test_two_runs_give_the_same_bits(loss: str) -> None:
    """Sums run in one order."""
    arguments = case(TOKENS, VOCAB).leaves()
    first, second = (gradients(linear_cross_entropy, arguments, **LOSSES[loss]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("core")
def test_a_weight_that_changed_since_the_forward_pass_is_noticed() -> None:
    """The gradients of the old weight are not handed out for the new one."""
    hidden, weight, target, _ = case(TOKENS, VOCAB).leaves()
    loss = linear_cross_entropy(hidden, weight, target)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_predict_is_exactly_zero_with_a_graph(tokens: int, reduction: str) -> None:
    """No 0 / 0, with every option on."""
    hidden, weight, target, bias = case(tokens, VOCAB, ignored=1.0).leaves()
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "class_weights": weights(VOCAB, 2)}
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction, **options)
    assert torch.equal(loss, torch.zeros_like(loss))
    loss.sum().backward()
    for tensor in (hidden, weight, bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("zero", ["token_weights", "class_weights", "num_items"])
def test_weights_of_zero_give_zero(zero: str) -> None:
    """A batch in which nothing counts has loss 0 and no NaN; 0 items divide by 1."""
    hidden, weight, target, _ = case(TOKENS, VOCAB).leaves()
    value = {"token_weights": torch.zeros(TOKENS), "class_weights": torch.zeros(VOCAB), "num_items": 0}[zero]
    loss = linear_cross_entropy(hidden, weight, target, **{zero: value})
    loss.backward()
    if zero == "num_items":
        torch.testing.assert_close(loss, naive_loss(hidden, weight, target, reduction="sum"), **DOUBLE)
    else:
        assert loss == 0
        assert weight.grad.abs().max() == 0


@pytest.mark.usefixtures("core")
def test_what_stands_at_ignored_targets_is_never_read() -> None:
    """Hidden states and token weights that are NaN there."""
    hidden, weight, target, _ = case(TOKENS, VOCAB)
    hidden[target == -100] = torch.nan
    token_weights = weights(TOKENS, 1).masked_fill(target == -100, torch.nan)
    hidden.requires_grad_()
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(
            hidden, weight.requires_grad_(), target, token_weights=token_weights, z_loss=0.1, reduction=reduction
        )
        assert torch.isfinite(loss).all()
        for gradient in torch.autograd.grad(loss.sum(), (hidden, weight)):
            assert torch.isfinite(gradient).all()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_weights_may_learn(reduction: str) -> None:
    """Then the loss is a sum of per-token losses, and the weights get their gradient too."""
    hidden, weight, target, _ = case(TOKENS, VOCAB).leaves()
    token_weights = weights(TOKENS, 1).requires_grad_()
    grads = [
        torch.autograd.grad(
            function(hidden, weight, target, token_weights=token_weights, reduction=reduction, z_loss=0.1),
            (hidden, weight, token_weights),
        )
        for function in (linear_cross_entropy, naive_loss)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


# ---------------------------------------------------------------------- what else comes back


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_log_probabilities_of_the_same_pass(reduction: str) -> None:
    """As `linear_log_prob` gives them, without a graph, also where the loss needs columns of its own."""
    hidden, weight, target, _ = case(TOKENS, VOCAB).leaves()
    options: dict[str, Any] = {"entropy": True, "top1": True}
    loss, out = linear_cross_entropy(
        hidden, weight, target, label_smoothing=0.1, reduction=reduction, return_log_prob=True, **options
    )
    for ours, expected in zip(out, linear_log_prob(hidden, weight, target, **options), strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert not ours.requires_grad
            torch.testing.assert_close(ours, expected.detach(), **DOUBLE)
    assert loss.requires_grad
    _, plain = linear_cross_entropy(hidden, weight, target, return_log_prob=True)
    assert plain[2:] == (None, None, None)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("logit_map", MAPS)
def test_gradients_cancel_over_the_real_vocabulary(logit_map: str, loss: str) -> None:
    """Shifting all logits of a token changes nothing but the z-loss: no gradient went into padded columns."""
    hidden, weight, target, bias = case(TOKENS, 65).leaves()
    options = {k: v[:65] if k == "class_weights" else v for k, v in LOSSES[loss].items() if k != "z_loss"}
    linear_cross_entropy(hidden, weight, target, bias=bias, **MAPS[logit_map], **options).backward()
    assert weight.grad.shape == (65, 12)
    if "softcap" not in MAPS[logit_map]:
        assert bias.grad.sum().abs() < 1e-14
    assert bias.grad.abs().max() > 1e-4


def test_in_evaluation_nothing_is_prepared_for_a_backward_pass() -> None:
    """Under no_grad, and with frozen inputs."""
    hidden, weight, target, _ = case(TOKENS, VOCAB)
    expected = naive(hidden, weight, target).log_prob.sum() / -(target != -100).sum()
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target), expected, **DOUBLE)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected, **DOUBLE)


def test_second_derivatives_come_from_the_reference() -> None:
    hidden, weight, target, _ = case(3, VOCAB).leaves()

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=0.1)

    with force(log_prob="reference"):
        assert torch.autograd.gradgradcheck(run, (hidden, weight), fast_mode=True)
    with force(log_prob="chunked"), pytest.raises(UnsupportedDispatch, match="second-order"):
        torch.autograd.grad(run(hidden, weight), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reduction": "average"}, "reduction = 'average'"),
        ({"reduction": "sum", "num_items": 3}, "num_items = 3 with reduction = 'sum'"),
        ({"label_smoothing": 1.5}, r"label_smoothing = 1.5 is outside \[0, 1\]"),
        ({"token_weights": torch.ones(3)}, r"token_weights is \(3,\)"),
        ({"class_weights": torch.ones(3)}, r"class_weights is \(3,\)"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], named: str) -> None:
    hidden, weight, target, _ = case(TOKENS, VOCAB)
    with pytest.raises(InvalidArgument, match=named) as caught:
        linear_cross_entropy(hidden, weight, target, **options)
    assert caught.value.remedy


def test_a_label_outside_the_vocabulary_is_named() -> None:
    hidden, weight, target, _ = case(TOKENS, VOCAB)
    target[4] = VOCAB
    with pytest.raises(LabelOutOfRange, match=rf"label {VOCAB} at flat position 4"):
        linear_cross_entropy(hidden, weight, target)
