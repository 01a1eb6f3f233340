"""How far the log-prob core is from float64, in bf16 and fp32, over numbers of chunks, beside torch's and TRL's."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from trl.kernels import ChunkedLogProbFunction

from bestiary.kernels import vocab_tiles
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.log_prob import linear_log_prob

TOKENS, HIDDEN, VOCAB = 512, 64, 2048
CHUNKS = [1, 4, 16, 64]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def setting(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs rounded to `dtype`: what they are in float64 afterwards is the truth."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def results(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    value = loss(hidden, weight, target)
    return [value.detach().double(), *(g.double() for g in torch.autograd.grad(value, (hidden, weight)))]


def exact(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    wide = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    return results(lambda h, w, y: F.cross_entropy(h @ w.T, y), *wide, target)


def relative(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).norm() / truth.norm())


def errors(loss: Loss, dtype: torch.dtype) -> list[float]:
    """Of loss, dX and dW."""
    inputs = setting(dtype)
    return [relative(a, b) for a, b in zip(results(loss, *inputs), exact(*inputs), strict=True)]


def in_chunks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    rows = TOKENS // count
    monkeypatch.setattr(vocab_tiles, "HELD_BYTES", 1)
    monkeypatch.setattr(vocab_tiles, "HELD_ROWS", (rows, rows, rows))
    monkeypatch.setattr(vocab_tiles, "COLUMNS", 256)
    assert len(vocab_tiles.row_chunks(TOKENS, HIDDEN, VOCAB, torch.float32, held=1)) == count


def torchs(count: int) -> Loss:
    options = LinearCrossEntropyOptions(batch_chunk_size=TOKENS // count, chunking_method=None, acc_policy="accurate")
    return lambda hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, options=options)


def trls(monkeypatch: pytest.MonkeyPatch, count: int) -> Loss:
    """Its torch code, since this is a CPU: `count` chunks of rows, and of the vocabulary, where dX adds up."""
    monkeypatch.setattr(sys.modules[ChunkedLogProbFunction.__module__], "TOKEN_CHUNK_SIZE", TOKENS // count)
    options = (None, 1.0, ("log_probs",))
    return lambda hidden, weight, target: (
        -ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, VOCAB // count, *options)[0].mean()
    )


@pytest.mark.slow
def test_bf16_errors_are_the_rounding_of_the_result_for_any_number_of_chunks(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """dX and dW within 1.5 × what rounding the exact gradient to bf16 costs, the loss to fp32.

    torch's dW grows with the chunks; both others round the logits to bf16, which their loss shows.
    """
    truth = exact(*setting(torch.bfloat16))
    floor = [relative(gradient.to(torch.bfloat16).double(), gradient) for gradient in truth[1:]]
    ours, torch_errors, trl_errors = {}, {}, {}
    for count in CHUNKS:
        with monkeypatch.context() as patch:
            in_chunks(patch, count)
            ours[count] = errors(linear_cross_entropy, torch.bfloat16)
            trl_errors[count] = errors(trls(patch, count), torch.bfloat16)
        torch_errors[count] = errors(torchs(count), torch.bfloat16)
    tables = {"ours": ours, "torch": torch_errors, "trl": trl_errors}
    sys.stdout.write(f"bf16 rounding floor of dX, dW: {floor[0]:.2e} {floor[1]:.2e}\n")
    for count in CHUNKS:
        figures = [f"{who} {' '.join(f'{e:.2e}' for e in table[count])}" for who, table in tables.items()]
        record_property(f"bf16, {count} chunks: relative error of loss, dX, dW", "; ".join(figures))
        sys.stdout.write(f"bf16 {count:3d} chunks  {'   '.join(figures)}\n")
        assert ours[count][0] <= 1e-6
        assert ours[count][1] <= 1.5 * floor[0]
        assert ours[count][2] <= 1.5 * floor[1]
        assert ours[count][2] <= 1.01 * ours[1][2], "no growth with the number of chunks"
    for theirs in (torch_errors, trl_errors):
        assert theirs[64][0] > 100 * ours[64][0]
    assert torch_errors[64][2] > 1.5 * ours[64][2]


def test_fp32_errors_do_not_grow_with_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few units in the last place."""
    for count in CHUNKS:
        with monkeypatch.context() as patch:
            in_chunks(patch, count)
            figures = errors(linear_cross_entropy, torch.float32)
        sys.stdout.write(f"fp32 {count:3d} chunks  ours {' '.join(f'{e:.2e}' for e in figures)}\n")
        assert max(figures) <= 1e-6


def unrounded(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log p and d mean(−log p) / d hidden in float64, by the sum over other words: log_softmax says 0 for −1e−17."""
    h, w = hidden.detach().double(), weight.detach().double()
    logits = h @ w.T
    chosen = logits.gather(-1, target[:, None])
    others = (logits - chosen).exp().scatter(-1, target[:, None], 0.0)
    rest = others.sum(-1, keepdim=True)
    slope = (others / (1 + rest)).scatter(-1, target[:, None], -rest / (1 + rest))
    return -rest.squeeze(-1).log1p(), slope @ w / len(h)


@pytest.mark.parametrize("mode", ["scalar", "per token"])
def test_a_sure_model_gets_the_digits_of_its_small_gradients(mode: str) -> None:
    """p → 1: the exact gradient is tiny, and p − 1 in fp32 is noise or 0. Ours keeps its relative error."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 48, generator=generator)
    target = torch.randint(0, 300, (16,), generator=generator)
    hidden = weight[target] * torch.linspace(0.3, 0.9, 16)[:, None]

    def ours(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, y) if mode == "scalar" else -linear_log_prob(h, w, y).log_prob.mean()

    inputs = (hidden.requires_grad_(), weight.requires_grad_(), target)
    true_log_prob, true_gradient = unrounded(*inputs)
    assert true_log_prob.max() > -1e-12, "some are surer than fp32, or even float64, can say"
    assert true_log_prob.min() < -0.1
    log_prob = linear_log_prob(*inputs).log_prob.detach().double()
    assert ((log_prob - true_log_prob).abs() <= 1e-5 * true_log_prob.abs()).all()

    def per_row(gradient: Tensor) -> Tensor:
        return (gradient - true_gradient).norm(dim=1) / true_gradient.norm(dim=1)

    assert per_row(results(ours, *inputs)[1]).max() < 1e-5
    naive = results(lambda h, w, y: F.cross_entropy(h @ w.T, y), *inputs)[1]
    assert (per_row(naive) > 1e-2).sum() >= 4, "where torch's has no digit left"


@pytest.mark.parametrize("offset", [0.0, 4096.0, -4096.0])
def test_an_offset_common_to_all_logits_changes_nothing(offset: float) -> None:
    """Logits are integers here, exact in fp32 with the offset: log-probabilities keep every bit."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-2, 3, (n, 8), generator=generator).float() for n in (5, 130))
    target = torch.randint(0, 130, (5,), generator=generator)
    plain = linear_log_prob(hidden, weight, target, entropy=True)
    shifted = linear_log_prob(hidden, weight, target, bias=torch.full((130,), offset), entropy=True)
    assert torch.equal(shifted.log_prob, plain.log_prob)
    assert torch.equal(shifted.entropy, plain.entropy)
