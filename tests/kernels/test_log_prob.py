"""The log-prob core against the log-softmax that it never materialises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels import log_prob as module
from bestiary.kernels.errors import LabelOutOfRange
from bestiary.kernels.log_prob import LogProb, linear_log_prob

HIDDEN = 12
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "cap": {"softcap": 1.3},
    "all": {"divisor": 1.9, "softcap": 1.3, "temperature": 2.5},
}


def setting(tokens: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets of which about a third are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden, weight, target.masked_fill(torch.rand(tokens, generator=generator) < 0.3, -100)


def naive(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> LogProb:
    """All logits at once."""
    logits = hidden @ weight.T / divisor
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    valid = target != ignore_index
    chosen = log_p.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    lse = (logits / temperature).exp().sum(-1).log()
    entropy = -(log_p.exp() * log_p).sum(-1)
    zero = torch.zeros_like(chosen)
    return LogProb(*(torch.where(valid, column, zero) for column in (chosen, lse, entropy)))


@pytest.fixture(params=[2**26, 200], ids=["one chunk", "many chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Logits per chunk; 200 gives chunks of one to three tokens here."""
    monkeypatch.setattr(module, "_LOGITS_PER_CHUNK", request.param)
    return int(request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", [1, 65, 128, 203])
def test_values_and_gradients_are_those_of_log_softmax(vocab: int, options: str) -> None:
    """Log-probability, log-sum-exp and entropy, and the gradient of a mixture of all three."""
    gradients = []
    for function in (linear_log_prob, naive):
        hidden, weight, target = setting(9, vocab)
        hidden.requires_grad_()
        weight.requires_grad_()
        extra = {"entropy": True} if function is linear_log_prob else {}
        out = function(hidden, weight, target, **OPTIONS[options], **extra)
        mix = torch.arange(1.0, 10.0, dtype=torch.float64)
        (mix @ out.log_prob + 0.3 * mix @ out.lse + 0.7 * mix @ out.entropy).backward()
        gradients.append([*(column.detach() for column in out), hidden.grad, weight.grad])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@given(st.integers(0, 7), st.integers(1, 70), st.integers(0, 2**16))
def test_any_size_equals_log_softmax(tokens: int, vocab: int, seed: int) -> None:
    """No tokens and one token, one word and more than a tile."""
    hidden, weight, target = setting(tokens, vocab, seed)
    out, expected = linear_log_prob(hidden, weight, target), naive(hidden, weight, target)
    assert out.entropy is None
    torch.testing.assert_close(out.log_prob, expected.log_prob, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.lse, expected.lse, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunk")
def test_gradcheck() -> None:
    """Numerical derivatives of every output, in float64."""
    hidden, weight, target = setting(5, 67)

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_log_prob(hidden, weight, target, softcap=1.3, temperature=0.7, entropy=True))

    assert torch.autograd.gradcheck(run, (hidden.requires_grad_(), weight.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_predict_gives_exact_zeros_that_have_a_graph(tokens: int) -> None:
    """A rank whose labels are all masked still runs its backward pass, with zero gradients."""
    hidden, weight, _ = setting(tokens, 67)
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_log_prob(hidden, weight, torch.full((tokens,), -100), entropy=True)
    assert all(torch.equal(column, torch.zeros(tokens, dtype=torch.float64)) for column in out)
    out.log_prob.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert hidden.grad is None or torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_ignored_tokens_are_never_read() -> None:
    """Not even NaN in an ignored position reaches a value or a gradient."""
    hidden, weight, target = setting(9, 67)
    hidden[target == -100] = torch.nan
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_log_prob(hidden, weight, target)
    out.log_prob.sum().backward()
    assert torch.isfinite(out.log_prob).all()
    assert torch.isfinite(weight.grad).all()
    assert hidden.grad[target == -100].abs().max() == 0


def test_another_ignore_index() -> None:
    """0 as a padding id that is also a token id."""
    hidden, weight, target = setting(9, 67)
    target = target.clamp(min=0)
    out = linear_log_prob(hidden, weight, target, ignore_index=0)
    expected = naive(hidden, weight, target, ignore_index=0)
    torch.testing.assert_close(out.log_prob, expected.log_prob)
    assert (out.log_prob[target == 0] == 0).all()
    assert (target == 0).any()


@pytest.mark.parametrize(("label", "position"), [(67, 3), (-1, 5), (10**12, 0)])
def test_a_label_outside_the_vocabulary_is_named(label: int, position: int) -> None:
    """With its position, also where the padded tile of the head would have a column for it."""
    hidden, weight, target = setting(9, 67)
    target[position] = label
    with pytest.raises(LabelOutOfRange, match=rf"label {label} at flat position {position} is outside \[0, 67\)"):
        linear_log_prob(hidden, weight, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs_give_fp32_results(dtype: torch.dtype) -> None:
    """The log-sum-exp of logits that are rounded once; gradients come in the dtype of the inputs."""
    hidden, weight, target = setting(9, 203)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    out = linear_log_prob(hidden, weight, target)
    assert out.log_prob.dtype == out.lse.dtype == torch.float32
    valid = target != -100
    logits = (hidden.detach()[valid] @ weight.detach().T).double()
    expected = logits.log_softmax(-1).gather(-1, target[valid][:, None]).squeeze(-1)
    torch.testing.assert_close(out.log_prob[valid].double(), expected, rtol=1e-5, atol=1e-5)
    out.log_prob.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_logits_are_never_held_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives from the forward to the backward pass is less than a tenth of (N, V)."""
    monkeypatch.setattr(module, "_LOGITS_PER_CHUNK", 2048)
    hidden, weight, target = setting(256, 512)
    hidden.requires_grad_()
    kept: dict[int, int] = {}
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (hidden, weight)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in inputs:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = linear_log_prob(hidden, weight, target)
    assert out.log_prob.requires_grad
    assert kept
    assert sum(kept.values()) < 256 * 512 / 10
