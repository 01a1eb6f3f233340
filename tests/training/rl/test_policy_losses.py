"""Policy losses: gradients as finite differences say, blind to packing, order and masked answers, at every level."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.algorithms import ALGORITHMS, named
from bestiary.training.rl.losses import Objective, policy_loss
from bestiary.training.rl.mismatch import Correction, Parity, on_policy, parity

from .answers import LENGTHS, answers

# Each kind, level and aggregation, and what is added to a loss.
OBJECTIVES = {
    **{name: made.objective for name, made in ALGORITHMS.items()},
    "dr_grpo": named("dr_grpo", max_tokens=9).objective,
    "gspo token": named("gspo", level="sequence_token").objective,
    "importance": Objective(kind="importance"),
    "log_prob": Objective(kind="log_prob", aggregation="sequence_sum", max_tokens=9),
    "dual clip": Objective(dual_clip=1.4, aggregation="sequence_mean"),
    "kl": Objective(kl="k2", kl_coef=0.3, aggregation="sequence_mean"),
    "weighted kl": Objective(kl_coef=0.3, kl_weighted=True),
    "entropy": Objective(entropy_coef=0.2, aggregation="sequence_mean"),
}
STRAIGHT_THROUGH = ("gspo token", "cispo")  # whose value is not what their gradient is of


def total(found, objective, **more):
    """Loss and gradient of a step of one micro-batch."""
    found = found.leaf()
    stream = found.stream()
    loss = policy_loss(
        stream,
        objective,
        reference=found.packed(found.reference),
        entropy=found.packed(found.entropy),
        weights=Correction(high=1.2).weights(stream.old, found.packed(found.rollout), stream),
        **more,
    )
    (gradient,) = torch.autograd.grad(loss.total, found.log_probs)
    return loss, gradient


def rows(found, places):
    """Some of the answers."""
    return replace(found, **{name: values[list(places)] for name, values in vars(found).items()})


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in STRAIGHT_THROUGH])
def test_gradients_are_those_of_finite_differences(name):
    found = answers(lengths=(3, 1, 4), spread=0.5).leaf()

    def loss(log_probs, entropy):
        given = replace(found, log_probs=log_probs)
        made = policy_loss(
            given.stream(),
            OBJECTIVES[name],
            reference=found.packed(found.reference),
            entropy=found.packed(entropy * found.mask),
        )
        return made.total

    assert gradcheck(loss, (found.log_probs, found.entropy.requires_grad_(True)))


@pytest.mark.parametrize("name", OBJECTIVES)
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_neither_micro_batches_nor_their_order_change_a_gradient(name, data, seed):
    """All answers in one pack, and shuffled into up to three: the same sum, gradient and figures."""
    found = answers(seed, spread=0.5)
    expected, gradient = total(found, OBJECTIVES[name])
    places = data.draw(st.permutations(range(len(LENGTHS))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(LENGTHS) - 1), max_size=2)))
    parts = [places[start:end] for start, end in zip([0, *cuts], [*cuts, len(LENGTHS)], strict=True)]
    made = [total(rows(found, part), OBJECTIVES[name]) for part in parts]
    torch.testing.assert_close(sum(loss.total for loss, _ in made), expected.total, rtol=1e-9, atol=1e-9)
    for key, value in expected.metrics.items():
        torch.testing.assert_close(sum(loss.metrics[key] for loss, _ in made), value, rtol=1e-9, atol=1e-9, msg=key)
    for part, (_, of_part) in zip(parts, made, strict=True):
        torch.testing.assert_close(of_part, gradient[part], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_answer_masked_whole_changes_nothing(name):
    """Nor what stands in it, infinities included."""
    found = answers(spread=0.5)
    expected, gradient = total(found, OBJECTIVES[name])
    more = replace(
        found,
        **{
            key: torch.cat([values, torch.full_like(values[:1], 0.0 if key == "mask" else torch.inf)])
            for key, values in vars(found).items()
        },
    )
    made, of_more = total(more, OBJECTIVES[name])
    torch.testing.assert_close(made.total, expected.total, rtol=0, atol=0)
    assert torch.equal(of_more[:-1], gradient)
    assert not of_more[-1].any()
    for key, value in expected.metrics.items():
        torch.testing.assert_close(made.metrics[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_step_on_an_answer_is_the_plain_policy_gradient(name):
    """With r = 1 every loss has the gradient −A ∇log π at its own weights of tokens, the additions aside."""
    found = answers()
    found = replace(found, old=found.log_probs, reference=found.log_probs).leaf()
    objective = replace(OBJECTIVES[name], entropy_coef=0.0)
    loss = policy_loss(found.stream(), objective, reference=found.packed(found.reference))
    (gradient,) = torch.autograd.grad(loss.total, found.log_probs)
    lengths = found.mask.sum(1, keepdim=True)
    weights = {"token_mean": 1.0, "sequence_mean": 1.0 / lengths, "sequence_sum": 1.0 / (objective.max_tokens or 1)}
    scale = weights[objective.aggregation] * (lengths if objective.level == "product" else 1.0)
    torch.testing.assert_close(gradient, -found.advantages * scale * found.mask, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_weighted_k3_is_that_of_k2_on_policy(weighted):
    found = answers()
    found = replace(found, old=found.log_probs, advantages=torch.zeros_like(found.mask)).leaf()
    objective = Objective(kl_coef=1.0, kl="k3" if weighted else "k3+", kl_weighted=weighted)
    loss = policy_loss(found.stream(), objective, reference=found.packed(found.reference))
    (gradient,) = torch.autograd.grad(loss.total, found.log_probs)
    expected = (found.log_probs - found.reference).detach() * found.mask
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction_is_one_where_both_agree(kind, level):
    found = answers()
    stream = found.stream()
    weights = Correction(kind=kind, level=level, low=0.5).weights(stream.old, stream.old, stream)
    assert torch.equal(weights, torch.ones_like(weights))


def test_icepop_is_masked_importance_sampling_of_tokens():
    found = answers()
    stream, rollout = found.stream(), found.packed(found.rollout)
    icepop = Correction(kind="icepop", low=0.8, high=1.3).weights(stream.old, rollout, stream)
    ratio = (stream.old - rollout).exp()
    expected = torch.where((ratio >= 0.8) & (ratio <= 1.3) | ~stream.trained, ratio, 0.0)
    torch.testing.assert_close(icepop[stream.trained], expected[stream.trained])
    assert bool((icepop == 0).any())


def test_a_likely_answer_and_a_good_one_stay_whatever_the_drift():
    found = answers()
    stream = found.stream(found.advantages.abs())
    assert bool(on_policy(stream.old, stream.old + 9.0, stream, 0.1).all())


def test_parities_of_parts_add_up():
    found = answers()
    mask = found.mask == 1
    whole = parity(found.old, found.rollout, mask)
    parts = sum((parity(found.old[row], found.rollout[row], mask[row]) for row in range(len(mask))), Parity())
    assert parts.figures() == pytest.approx(whole.figures())
    assert whole.figures()["mismatch/ess"] < 1.0
    same = parity(found.old, found.old, mask).figures()
    assert same == Parity().figures()


def test_a_log_probability_that_is_missing_is_no_agreement():
    found = answers()
    found.rollout[0, 1] = torch.nan
    with pytest.raises(InvalidRun, match="not finite"):
        parity(found.old, found.rollout, found.mask == 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_low", 1.5),
        ("clip_high", -0.1),
        ("dual_clip", 1.1),
        ("kind", "clipped"),
        ("level", "word"),
        ("max_tokens", 0),
        ("kl_coef", -1.0),
        ("kl", "k4"),
        ("aggregation", "mean"),
        ("scale", "std"),
        ("gamma", 2.0),
        ("clip_hi", 0.2),
    ],
)
def test_a_wrong_value_of_an_algorithm_is_named(field, value):
    with pytest.raises(InvalidRun, match=field):
        named("dr_grpo", **{field: value})


def test_a_term_without_what_it_reads_is_refused():
    stream = answers().stream()
    with pytest.raises(InvalidRun, match="no reference"):
        policy_loss(stream, Objective(kl_coef=0.1))
    with pytest.raises(InvalidRun, match="no entropy"):
        policy_loss(stream, Objective(entropy_coef=0.1))
    with pytest.raises(InvalidRun, match="mean of its gradient is 0"):
        Objective(kl="k1", kl_coef=0.1)


def test_the_table_names_sources_and_differences():
    for made in ALGORITHMS.values():
        assert "arXiv:" in made.source
        assert made.differs
    assert named("grpo") is not None
    with pytest.raises(InvalidRun, match="did you mean grpo"):
        named("gropo")
