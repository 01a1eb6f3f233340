"""Columns that round the vocabulary up to a multiple of 64: no probability, no gradient, no trace, in any loss.

V mod 64 ∈ {0, 1, 63}; with soft cap, divisor, temperature, label smoothing and z-loss, in KL, JSD and top-k.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.kernels import divergence_chunked, log_prob_chunked, selected
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import force
from bestiary.kernels.divergence import TeacherHead, TopK, linear_divergence
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.log_prob_gradients import Gradients
from bestiary.kernels.selected import linear_selected_log_prob
from bestiary.kernels.vocab_tiles import Tile

from .naive_head import MAPS, Case, case

TOKENS = 5
VOCABULARIES = [64, 65, 127]
KINDS = ["forward_kl", "reverse_kl", "jsd"]


def losses(inputs: Case, options: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """Every function of a head, each as a scalar."""
    hidden, weight, target, bias = inputs
    tokens, vocab = len(hidden), len(weight)
    other = case(tokens, vocab, seed=3)
    words = torch.stack([torch.tensor([0, vocab - 1, vocab // 2])] * tokens)
    given_top = (other.hidden @ other.weight.T).log_softmax(-1).gather(1, words)
    given: dict[str, Any] = {"bias": bias, **options}

    def log_probs() -> Tensor:
        out = linear_log_prob(hidden, weight, target, entropy=True, logit_mean=True, **given)
        assert out.entropy is not None
        assert out.logit_mean is not None
        return (out.log_prob + out.lse + out.entropy + out.logit_mean).sum()

    def chosen() -> Tensor:
        out = linear_selected_log_prob(hidden, weight, words, **given)
        return out.log_prob.sum() + out.log_rest.sum()

    found: dict[str, Callable[[], Tensor]] = {"log-probs": log_probs, "selected": chosen}
    for reduction in ("mean", "none"):
        for name, more in (("plain", {}), ("smoothing", {"label_smoothing": 0.2}), ("z-loss", {"z_loss": 0.1})):
            loss = partial(linear_cross_entropy, hidden, weight, target, reduction=reduction, **more, **given)
            found[f"cross entropy {name} {reduction}"] = lambda loss=loss: loss().sum()
        for kind in KINDS:
            for name, teacher in (
                ("head", TeacherHead(other.hidden, other.weight, other.bias)),
                ("bucket", TopK(words, given_top)),
                ("top-k alone", TopK(words, given_top, "renormalise")),
            ):
                loss = partial(linear_divergence, hidden, weight, teacher, kind=kind, reduction=reduction, **given)
                found[f"{kind} {name} {reduction}"] = lambda loss=loss: loss().sum()
    return found


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tile, Tensor]]:
    """Every tile's gradient of the logits, as the chunked implementations hand it to the products."""
    seen: list[tuple[Tile, Tensor]] = []

    class Seen(Gradients):
        def add(self, dz: Tensor, tile: Tile, weight: Tensor, x: Tensor, rows: slice) -> None:
            seen.append((tile, dz.clone()))
            super().add(dz, tile, weight, x, rows)

    for module in (log_prob_chunked, divergence_chunked, selected):
        monkeypatch.setattr(module, "Gradients", Seen)
    return seen


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_padded_columns_receive_exactly_zero_gradient(
    vocab: int, logit_map: str, slopes: list[tuple[Tile, Tensor]]
) -> None:
    """Of every loss; the real ones receive theirs."""
    for name, loss in losses(case(TOKENS, vocab, ignored=0.0).leaves(), MAPS[logit_map]).items():
        slopes.clear()
        loss().backward()
        assert slopes, f"{name}: nothing was seen"
        padded = [dz[:, tile.real :] for tile, dz in slopes]
        assert sum(part.shape[1] for part in padded) > 0 or vocab == 64
        assert not any(part.any() for part in padded), name
        assert all(dz[:, : tile.real].any() for tile, dz in slopes), name


@pytest.fixture(params=["chunked", "reference"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with force(log_prob=request.param, divergence=request.param, selected_log_prob=request.param):
        yield


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_rest_of_a_padded_storage_is_never_read(vocab: int, logit_map: str) -> None:
    """Weight and bias are the first V rows of memory whose tail is NaN; losses and gradients are the same bits."""
    results = []
    for padded in (False, True):
        inputs = case(TOKENS, vocab).leaves()
        if padded:
            weight, bias = (
                torch.cat((x.detach(), x.new_full((64, *x.shape[1:]), torch.nan)))[:vocab].requires_grad_()
                for x in (inputs.weight, inputs.bias)
            )
            inputs = inputs._replace(weight=weight, bias=bias)
        found = [loss() for loss in losses(inputs, MAPS[logit_map]).values()]
        sum(found, found[0].new_zeros(())).backward()
        results.append([*(x.detach() for x in found), inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad])
    assert all(torch.isfinite(x).all() for x in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_words_and_their_rest_sum_to_one(vocab: int, logit_map: str) -> None:
    """Σ p over the real vocabulary, of selected words and of those that are not."""
    hidden, weight, _, bias = case(TOKENS, vocab)
    words = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(i))[:4] for i in range(TOKENS)])
    out = linear_selected_log_prob(hidden, weight, words, bias=bias, **MAPS[logit_map])
    total = out.log_prob.exp().sum(-1) + out.log_rest.exp()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-13)
