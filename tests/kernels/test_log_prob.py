"""The log-prob core against the log-softmax that it never materialises."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import InvalidArgument, LabelOutOfRange, UnsupportedDispatch
from bestiary.kernels.log_prob import LogProb, linear_log_prob

from .naive_head import MAPS, case, logits_of, naive

ALL = {"entropy": True, "top1": True, "logit_mean": True}
DOUBLE = {"rtol": 1e-11, "atol": 1e-12}


def mixed(out: LogProb) -> Tensor:
    """A scalar in which every differentiable column of every token counts with a weight of its own."""
    weights = torch.arange(1.0, len(out.log_prob) + 1, dtype=out.log_prob.dtype)
    parts = ((1.0, out.log_prob), (0.3, out.lse), (0.7, out.entropy), (-0.4, out.logit_mean))
    return sum((share * (weights @ column) for share, column in parts if column is not None), weights.new_zeros(()))


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 203])
def test_values_and_gradients_are_those_of_log_softmax(vocab: int, logit_map: str, with_bias: bool) -> None:
    """Every column, and the gradient of a mixture of all of them."""
    results = []
    for function, extra in ((linear_log_prob, ALL), (naive, {})):
        hidden, weight, target, bias = case(9, vocab).leaves()
        out = function(hidden, weight, target, bias=bias if with_bias else None, **MAPS[logit_map], **extra)
        mixed(out).backward()
        assert out.top1 is not None
        grads = [hidden.grad, weight.grad] + ([bias.grad] if with_bias else [])
        results.append([*(column.detach() for column in out), *grads])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, **DOUBLE)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("column", ["log_prob", "lse", "entropy", "logit_mean"])
@pytest.mark.parametrize("logit_map", MAPS)
def test_each_column_alone_has_its_gradient(logit_map: str, column: str) -> None:
    """gradcheck in float64, through hidden states, weight and bias."""
    hidden, weight, target, bias = case(5, 67).leaves()

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        extra = {column: True} if column in ALL else {}
        out = linear_log_prob(hidden, weight, target, bias=bias, **MAPS[logit_map], **extra)
        return out._asdict()[column]

    assert torch.autograd.gradcheck(run, (hidden, weight, bias), fast_mode=True)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "options", [c for n in range(4) for c in combinations(("divisor", "softcap", "temperature"), n)]
)
def test_any_options_together_have_their_gradient(options: tuple[str, ...], with_bias: bool) -> None:
    """gradcheck in float64 of a mixture of all columns, under every subset of what makes the logits."""
    hidden, weight, target, bias = case(5, 67).leaves()
    logit_map = {name: {"divisor": 1.9, "softcap": 1.3, "temperature": 0.7}[name] for name in options}

    def run(hidden: Tensor, weight: Tensor, *given_bias: Tensor) -> Tensor:
        return mixed(linear_log_prob(hidden, weight, target, bias=(*given_bias, None)[0], **logit_map, **ALL))

    assert torch.autograd.gradcheck(run, (hidden, weight, bias) if with_bias else (hidden, weight), fast_mode=True)


@given(st.integers(0, 7), st.integers(1, 130), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 1.0]))
def test_any_size_equals_log_softmax(tokens: int, vocab: int, seed: int, ignored: float) -> None:
    """No tokens and one, one word and more than a tile, none, half and all ignored; both torch implementations."""
    hidden, weight, target, _ = case(tokens, vocab, seed, ignored)
    expected = naive(hidden, weight, target)
    for name in ("chunked", "reference"):
        with force(log_prob=name):
            out = linear_log_prob(hidden, weight, target, **ALL)
        for ours, theirs in zip(out, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **DOUBLE)


def test_only_what_is_asked_for_comes_back() -> None:
    hidden, weight, target, _ = case(3, 65)
    assert linear_log_prob(hidden, weight, target)[2:] == (None, None, None)


STRIDES = {
    "transposed": lambda t: t.T.contiguous().T,
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "one row expanded": lambda t: t[:1].expand(len(t), -1),
    "one column expanded": lambda t: t[:, :1].expand(-1, t.shape[1]),
}


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("of_weight", STRIDES)
@pytest.mark.parametrize("of_hidden", STRIDES)
def test_inputs_may_have_any_strides(of_hidden: str, of_weight: str) -> None:
    """The same numbers as from contiguous copies (top-1 apart: equal rows tie)."""
    hidden, weight, target, _ = case(6, 67)
    strided = (STRIDES[of_hidden](hidden).detach(), STRIDES[of_weight](weight).detach())
    results = []
    for h, w in (strided, (strided[0].contiguous(), strided[1].contiguous())):
        h, w = h.requires_grad_(), w.requires_grad_()
        out = linear_log_prob(h, w, target, entropy=True, logit_mean=True)
        results.append([out.log_prob, out.lse, out.entropy, out.logit_mean, *torch.autograd.grad(mixed(out), (h, w))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, **DOUBLE)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("how", ["expanded", "strided", "zero", "random"])
def test_upstream_gradients_are_read_token_by_token(how: str) -> None:
    """`y.sum().backward()` hands over one number with stride 0."""
    hidden, weight, target, _ = case(7, 67).leaves()
    upstream = {
        "expanded": torch.tensor(0.7, dtype=torch.float64).expand(7),
        "strided": torch.arange(14, dtype=torch.float64)[::2],
        "zero": torch.zeros(7, dtype=torch.float64),
        "random": torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    }[how]
    grads = [
        torch.autograd.grad(function(hidden, weight, target).log_prob, (hidden, weight), upstream)
        for function in (linear_log_prob, naive)
    ]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, **DOUBLE)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_predict_gives_exact_zeros_that_have_a_graph(tokens: int) -> None:
    """A rank whose labels are all masked still runs its backward pass, with zero gradients."""
    hidden, weight, _, bias = case(tokens, 67).leaves()
    out = linear_log_prob(hidden, weight, torch.full((tokens,), -100), bias=bias, **ALL)
    for name, column in out._asdict().items():
        fill = -1 if name == "top1" else 0
        assert torch.equal(column, torch.full_like(column, fill)), name
    mixed(out).backward()
    for tensor in (hidden, weight, bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("where", ["first", "last", "between"])
def test_ignored_tokens_are_never_read(where: str) -> None:
    """NaN in an ignored position, or in memory that was never written (the fixture poisons it), reaches nothing."""
    hidden, weight, target, _ = case(9, 67, ignored=0.0)
    at = {"first": slice(0, 3), "last": slice(6, 9), "between": slice(2, 8, 2)}[where]
    target[at] = -100
    clean = linear_log_prob(hidden, weight, target, **ALL)
    hidden[at] = torch.nan
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_log_prob(hidden, weight, target, **ALL)
    mixed(out).backward()
    for ours, expected in zip(out, clean, strict=True):
        assert torch.equal(ours, expected)
    assert torch.isfinite(weight.grad).all()
    assert torch.isfinite(hidden.grad).all()
    assert hidden.grad[at].abs().max() == 0


@pytest.mark.usefixtures("core")
def test_another_ignore_index() -> None:
    """0 as a padding id that is also a token id."""
    hidden, weight, target, _ = case(9, 67)
    target = target.clamp(min=0)
    out, expected = (
        linear_log_prob(hidden, weight, target, ignore_index=0, **ALL),
        naive(hidden, weight, target, ignore_index=0),
    )
    for ours, theirs in zip(out, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **DOUBLE)
    assert (target == 0).any()
    assert (target > 0).any()


@pytest.mark.parametrize(("label", "position"), [(67, 3), (-1, 5), (10**12, 0), (127, 8)])
def test_a_label_outside_the_vocabulary_is_named(label: int, position: int) -> None:
    """With its position, also where the padded tile of the head would have a column for it."""
    hidden, weight, target, _ = case(9, 67)
    target[position] = label
    with pytest.raises(LabelOutOfRange, match=rf"label {label} at flat position {position} is outside \[0, 67\)"):
        linear_log_prob(hidden, weight, target)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": torch.zeros(3, 4, 12)}, r"hidden is \(3, 4, 12\) and weight \(67, 12\)"),
        ({"weight": torch.zeros(67, 11)}, r"hidden is \(9, 12\) and weight \(67, 11\)"),
        ({"target": torch.zeros(8, dtype=torch.int64)}, r"target is \(8,\) torch.int64"),
        ({"target": torch.zeros(9)}, r"target is \(9,\) torch.float32"),
        ({"bias": torch.zeros(66)}, r"bias is \(66,\)"),
        ({"temperature": 0.0}, "temperature = 0.0 is not positive"),
        ({"softcap": -30.0}, "softcap = -30.0 is not positive"),
        ({"divisor": float("nan")}, "divisor = nan is not positive"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], named: str) -> None:
    hidden, weight, target, _ = case(9, 67)
    with pytest.raises(InvalidArgument, match=named) as caught:
        linear_log_prob(**{"hidden": hidden, "weight": weight, "target": target, **change})
    assert caught.value.remedy


def test_narrow_integers_are_labels_too() -> None:
    hidden, weight, target, _ = case(9, 67)
    out = linear_log_prob(hidden, weight, target.to(torch.int32))
    assert torch.equal(out.log_prob, linear_log_prob(hidden, weight, target).log_prob)


# ---------------------------------------------------------------------- logits of −∞


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("banned", [slice(0, 3), slice(0, 64), slice(64, 130), slice(1, 130)], ids=str)
def test_a_logit_of_minus_infinity_is_a_word_that_cannot_come(banned: slice) -> None:
    """Single ones, a whole tile, and all but one: no NaN, no probability, no gradient."""
    hidden, weight, target, bias = case(6, 130, ignored=0.0)
    allowed = [id_ for id_ in range(130) if id_ not in range(*banned.indices(130))]
    target = torch.tensor(allowed)[target % len(allowed)]
    banning = bias.clone()
    banning[banned] = -torch.inf
    results = []
    for rows in (slice(None), torch.tensor(allowed)):  # the whole vocabulary, and one without the banned words
        h, w, b = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_(), banning[rows].clone()
        renamed = target if isinstance(rows, slice) else torch.searchsorted(rows, target)
        out = linear_log_prob(h, w, renamed, bias=b.requires_grad_(), entropy=True, top1=True)
        mixed(out).backward()
        of_weight, of_bias = (w.grad, b.grad) if not isinstance(rows, slice) else (w.grad[allowed], b.grad[allowed])
        if isinstance(rows, slice):
            assert w.grad[banned].abs().max() == 0
            assert b.grad[banned].abs().max() == 0
        top1 = out.top1 if isinstance(rows, slice) else rows[out.top1]
        results.append([out.log_prob, out.lse, out.entropy, top1, h.grad, of_weight, of_bias])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, **DOUBLE)


@pytest.mark.usefixtures("core")
def test_a_target_that_cannot_come_has_log_probability_minus_infinity() -> None:
    """And the gradient of log-softmax, which is finite."""
    hidden, weight, target, bias = case(4, 70, ignored=0.0)
    bias[target[0]] = -torch.inf
    grads = []
    for function in (linear_log_prob, naive):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = function(h, w, target, bias=bias)
        assert out.log_prob[0] == -torch.inf
        assert torch.isfinite(out.log_prob[1:]).all() or (target[1:] == target[0]).any()
        grads.append(torch.autograd.grad(out.log_prob, (h, w), torch.ones(4, dtype=torch.float64)))
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, **DOUBLE)


# ---------------------------------------------------------------------- the vocabulary and its padding


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("vocab", [64, 65, 127])
def test_the_probabilities_of_the_real_vocabulary_sum_to_one(vocab: int, logit_map: str) -> None:
    """Padded columns have none, whatever bends or scales the logits; log-probabilities are never positive."""
    hidden, weight, _, _ = case(1, vocab)
    log_p = linear_log_prob(hidden.expand(vocab, -1), weight, torch.arange(vocab), **MAPS[logit_map]).log_prob
    torch.testing.assert_close(log_p.exp().sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-13)
    assert log_p.max() <= 0


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("logit_map", MAPS)
def test_gradients_exist_for_real_rows_only_and_cancel_over_the_vocabulary(logit_map: str) -> None:
    """Σ_c ∂ log p / ∂ b_c is 0 without a cap: none of it went into columns that do not exist."""
    hidden, weight, target, bias = case(5, 67, ignored=0.0).leaves()
    out = linear_log_prob(hidden, weight, target, bias=bias, **MAPS[logit_map])
    out.log_prob.sum().backward()
    assert weight.grad.shape == (67, 12)
    if "softcap" not in MAPS[logit_map]:
        assert bias.grad.sum().abs() < 1e-13


def test_top1_is_the_smallest_id_among_equals() -> None:
    """Whether the target is among them or not, within a tile and across tiles."""
    weight = torch.zeros(200, 4)
    weight[[3, 70, 190]] = 1.0
    hidden = torch.ones(4, 4)
    for name in ("chunked", "reference"):
        with force(log_prob=name):
            out = linear_log_prob(hidden, weight, torch.tensor([3, 70, 190, 5]), top1=True)
        assert out.top1.tolist() == [3, 3, 3, 3]


# ---------------------------------------------------------------------- dtypes


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_give_fp32_results(dtype: torch.dtype) -> None:
    """Of logits that are never rounded; gradients come in the dtype of the inputs, rounded once."""
    hidden, weight, target, _ = case(9, 203)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    out = linear_log_prob(hidden, weight, target, **ALL)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = naive(*exact, target)
    for ours, theirs in zip(out, expected, strict=True):
        assert ours.dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=2e-6, atol=2e-6)
    out.log_prob.sum().backward()
    expected.log_prob.sum().backward()
    for tensor, reference in zip((hidden, weight), exact, strict=True):
        assert tensor.grad.dtype == dtype
        bound = 0.51 * torch.finfo(dtype).eps * reference.grad.abs() + 3e-6  # half a unit in the last place
        assert ((tensor.grad.double() - reference.grad).abs() <= bound).all()


@pytest.mark.usefixtures("core")
def test_hidden_states_and_weight_may_differ_in_dtype() -> None:
    """The wider one decides, at least fp32."""
    hidden, weight, target, _ = case(5, 67)
    out = linear_log_prob(hidden.to(torch.bfloat16), weight, target)
    assert out.log_prob.dtype == torch.float64
    expected = naive(hidden.to(torch.bfloat16).double(), weight, target)
    torch.testing.assert_close(out.log_prob, expected.log_prob, **DOUBLE)


def test_autocast_does_not_narrow_it(core: str) -> None:
    """Neither the forward pass nor, where it is ours, the backward pass."""
    hidden, weight, target, _ = (t.to(torch.float32) if t.is_floating_point() else t for t in case(9, 67))
    results = []
    for enabled in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = linear_log_prob(h, w, target, entropy=True)
        loss = mixed(out)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled and core == "chunked"):
            loss.backward()
        results.append([*out[:3], h.grad, w.grad])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------- orders and sizes


def test_second_derivatives_come_from_the_reference_and_are_refused_elsewhere() -> None:
    """With a remedy in the message; the first derivative never comes out wrong instead."""
    hidden, weight, target, _ = case(3, 67).leaves()

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_log_prob(hidden, weight, target, softcap=1.3).log_prob

    with force(log_prob="reference"):
        assert torch.autograd.gradgradcheck(run, (hidden, weight), fast_mode=True)
    with force(log_prob="chunked"), pytest.raises(UnsupportedDispatch, match="second-order") as caught:
        torch.autograd.grad(run(hidden, weight).sum(), hidden, create_graph=True)
    assert "reference" in str(caught.value.remedy)


@pytest.mark.usefixtures("core")
def test_a_second_backward_call_gives_the_same_gradients() -> None:
    hidden, weight, target, _ = case(5, 67).leaves()
    loss = linear_log_prob(hidden, weight, target).log_prob.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_more_logits_than_32_bits_count() -> None:
    """N · V = 2³¹ + 2¹⁶: the last token's numbers are those it has alone."""
    tokens, vocab = 2**15 + 1, 2**16
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, 1, generator=generator), torch.randn(vocab, 1, generator=generator)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    out = linear_log_prob(hidden, weight, target)
    expected = naive(hidden[-3:], weight, target[-3:])
    torch.testing.assert_close(out.log_prob[-3:], expected.log_prob, rtol=1e-6, atol=1e-6)


def test_logits_of_the_naive_formula_are_not_all_alike() -> None:
    """What the other tests compare with does vary: caps clip, and words differ."""
    hidden, weight, _, _ = case(9, 203)
    logits = logits_of(hidden, weight)
    assert (logits.abs() > 1.3).double().mean() > 0.1
    assert logits.std() > 1
