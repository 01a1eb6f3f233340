"""Log-probabilities among the words allowed, against a softmax over nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels.allowed import linear_allowed_log_prob
from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import InvalidArgument, LabelOutOfRange
from bestiary.kernels.log_prob import linear_log_prob

from .naive_head import MAPS, Case, case, logits_of

DOUBLE = {"rtol": 1e-10, "atol": 1e-12}


def constrained(tokens: int, vocab: int, k: int, seed: int) -> tuple[Case, Tensor]:
    """Rows with up to k words, −1 among them; the target of a row that counts is one of them."""
    head, generator = case(tokens, vocab, seed), torch.Generator().manual_seed(seed)
    words = torch.rand(tokens, vocab, generator=generator).argsort(-1)[:, :k]
    words = words.masked_fill(torch.rand(words.shape, generator=generator) < 0.3, -1)
    words[:, -1] = head.target.where(head.target >= 0, -1)
    return head, words.masked_fill((words == words[:, -1:]) & (torch.arange(k) < k - 1), -1)


def dense(head: Case, words: Tensor, **logit_map: Any) -> tuple[Tensor, Tensor]:
    """log p and entropy over a vocabulary in which all other words are impossible."""
    counts = head.target >= 0
    logits = logits_of(head.hidden, head.weight, head.bias, **logit_map)[counts]
    own = words[counts]
    outside = torch.ones(len(own), logits.shape[1] + 1).bool().scatter(1, own.where(own >= 0, logits.shape[1]), False)
    log_p = logits.masked_fill(outside[:, :-1], -torch.inf).log_softmax(-1)
    chosen = log_p.gather(1, head.target[counts, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(outside[:, :-1], 0.0)).sum(-1)
    rows = chosen.new_zeros(len(counts))
    return rows.index_put((counts.nonzero()[:, 0],), chosen), rows.index_put((counts.nonzero()[:, 0],), entropy)


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(4, 130), st.integers(1, 4), st.integers(0, 2**16), st.sampled_from(list(MAPS)))
def test_they_are_a_softmax_over_the_words_allowed(tokens: int, vocab: int, k: int, seed: int, logit_map: str) -> None:
    """Values, entropy and gradients, in both implementations of the core beneath."""
    head, words = constrained(tokens, vocab, k, seed)
    weights = torch.arange(1.0, tokens + 1, dtype=torch.float64)

    def gradients(log_prob: Tensor, entropy: Tensor, of: Case) -> list[Tensor]:
        total = (weights * log_prob).sum() + (weights.flip(0) * entropy).sum()
        given = torch.autograd.grad(total, (of.hidden, of.weight, of.bias), allow_unused=True)
        return [log_prob.detach(), entropy.detach(), *(torch.zeros(()) if g is None else g for g in given)]

    one = head.leaves()
    expected = gradients(*dense(one, words, **MAPS[logit_map]), one)
    for name in ("chunked", "reference"):
        two = head.leaves()
        with force(selected_log_prob=name):
            out = linear_allowed_log_prob(
                two.hidden, two.weight, head.target, words, bias=two.bias, entropy=True, **MAPS[logit_map]
            )
            assert out.entropy is not None
            for ours, theirs in zip(gradients(out.log_prob, out.entropy, two), expected, strict=True):
                torch.testing.assert_close(ours, theirs, **DOUBLE)


def test_gradcheck() -> None:
    head, words = constrained(4, 67, 3, 1)
    leaves = head._replace(target=words[:, -1]).leaves()

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = linear_allowed_log_prob(hidden, weight, head.target, words, bias=bias, entropy=True, temperature=0.7)
        return out.log_prob, out.lse, out.entropy  # type: ignore[return-value]

    assert torch.autograd.gradcheck(run, (leaves.hidden, leaves.weight, leaves.bias), fast_mode=True)


def test_all_words_allowed_is_no_constraint_and_one_is_no_choice() -> None:
    head = case(5, 67)
    every = linear_allowed_log_prob(head.hidden, head.weight, head.target, torch.arange(67).expand(5, -1), entropy=True)
    free = linear_log_prob(head.hidden, head.weight, head.target, entropy=True)
    for ours, theirs in zip((every.log_prob, every.entropy), (free.log_prob, free.entropy), strict=True):
        torch.testing.assert_close(ours, theirs, **DOUBLE)
    leaves = head.leaves()
    alone = linear_allowed_log_prob(leaves.hidden, leaves.weight, head.target, head.target[:, None].clamp(min=-1))
    assert not alone.log_prob.any()
    alone.log_prob.sum().backward()
    assert leaves.hidden.grad is not None
    assert not leaves.hidden.grad.any()


def test_words_of_hardly_any_probability_keep_their_digits() -> None:
    """In float32, e⁻⁶⁰ of all of it: what a constraint meets before the model was trained on its words."""
    weight = torch.eye(8)
    hidden = torch.tensor([[60.0, 0.3, 0.1, 0, 0, 0, 0, 0]])
    out = linear_allowed_log_prob(hidden, weight, torch.tensor([1]), torch.tensor([[1, 2, 3]]))
    expected = hidden[0, 1:4].double().log_softmax(-1)[0]
    assert float(out.log_prob) == pytest.approx(float(expected), abs=1e-5)
    assert float(out.lse) < -58


def test_what_does_not_fit_is_named() -> None:
    head = case(2, 67, ignored=0.0)
    given = {"hidden": head.hidden, "weight": head.weight, "target": torch.tensor([3, 5])}
    with pytest.raises(InvalidArgument, match="target 5 of row 1 is not among the 1 words allowed"):
        linear_allowed_log_prob(**given, allowed=torch.tensor([[3, 9], [4, -1]]))
    with pytest.raises(InvalidArgument, match="names 5 twice"):
        linear_allowed_log_prob(**given, allowed=torch.tensor([[3, 9], [5, 5]]))
    with pytest.raises(LabelOutOfRange, match="label 67"):
        linear_allowed_log_prob(**given, allowed=torch.tensor([[3, 67], [5, 1]]))
    with pytest.raises(InvalidArgument, match=r"allowed is \(2,\)"):
        linear_allowed_log_prob(**given, allowed=torch.tensor([3, 5]))
