"""The recipe over real models: packing and accumulation, ratios at a temperature, columns at their places."""

from dataclasses import replace

import pytest
import torch

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.algorithms import ALGORITHMS, named
from bestiary.training.rl.mismatch import Correction
from bestiary.training.rl.packing import pack, with_log_probs
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.records import Experience

from ...models.tiny import FAMILIES, tiny
from ..recipes_case import assert_same, singles, step
from ..recipes_case import pack as other_pack
from .experiences import LENGTHS, PACK, TEMPERATURE, sampled_by, trajectory


def recipe(name, **more):
    constant = {"max_tokens": 9} if name == "dr_grpo" else {}
    return PolicyGradient(named(name, kl_coef=0.1, **constant), **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_neither_packing_nor_accumulation_nor_masked_answers_change_a_gradient(name):
    """One pack, several, and one with answers behind that are not trained; in every family for one algorithm."""
    for family in FAMILIES if name == "grpo" else ("qwen3",):
        model = tiny(family).train()
        given = sampled_by(model)
        made = recipe(name, correction=Correction(high=1.1), off_policy=0.05)
        loss, expected = step(made, model, pack(given, 60, 5))
        for length in (14, 25) if family == "qwen3" else (25,):
            packs = pack(given, length, 5, at_least=5)
            assert len(packs) > 1
            found_loss, found = step(made, model, packs)
            torch.testing.assert_close(found_loss, loss, rtol=1e-9, atol=1e-9)
            assert_same(found, expected)


def test_what_is_not_trained_changes_nothing():
    model = tiny("qwen3").train()
    given = sampled_by(model)
    loss, expected = step(recipe("grpo"), model, pack(given[1:], 60, 5))
    found_loss, found = step(recipe("grpo"), model, pack([replace(given[0], trained=False), *given[1:]], 60, 5))
    torch.testing.assert_close(found_loss, loss, rtol=0, atol=0)
    assert_same(found, expected, bound=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_ratio_is_one_with_the_weights_that_sampled(dtype):
    """At a temperature that is not 1, to the bit, in every family; so are mismatch and divergence nothing."""
    for family in FAMILIES:
        model = tiny(family, dtype).train()
        given = [Experience.of(trajectory(place)) for place in range(len(LENGTHS))]
        given = with_log_probs(model, given, "old_log_probs", **PACK)
        given = [
            replace(
                one,
                trajectory=replace(one.trajectory, rollout_log_probs=one.old_log_probs),
                reference_log_probs=one.old_log_probs,
            )
            for one in given
        ]
        made = recipe("dapo")
        for each in pack(given, **PACK):
            batch = made.batch(each)
            figures = made.loss(model, batch).metrics
            tokens = made.count(batch)
            assert float(figures["ratio"]) == tokens
            assert float(figures["kl"]) == 0.0
            assert float(figures["mismatch_mean"]) == 0.0
            assert float(figures["mismatch_mult_error"]) == tokens


def test_log_probabilities_are_those_of_each_token_at_the_temperature():
    """Computed alone, from logits."""
    model = tiny("qwen3")
    given = [Experience.of(trajectory(place)) for place in range(len(LENGTHS))]
    for one in with_log_probs(model, given, "reference_log_probs", **PACK):
        ids = torch.from_numpy(one.trajectory.ids).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / TEMPERATURE
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        sampled = torch.from_numpy(one.trajectory.sampled)[1:]
        found = torch.from_numpy(one.reference_log_probs)[1:]
        torch.testing.assert_close(found, torch.where(sampled, expected, 0.0), rtol=1e-9, atol=1e-9)


def test_the_gradient_of_the_first_step_is_that_of_weighted_likelihood():
    """No old log-probabilities: the ratio is against the policy itself, the sum is −Σ A log π at the temperature."""
    model = tiny("gemma3").train()
    given = [replace(one, old_log_probs=None) for one in sampled_by(model)]
    (each,) = pack(given, 60, 5)
    _, found = step(PolicyGradient("dapo"), model, [each])
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(length for _, length in LENGTHS)
    for one in given:
        ids = torch.from_numpy(one.trajectory.ids).long()
        logits = model(ids[None]).logits[0] / TEMPERATURE
        log_probs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        total = total - (torch.from_numpy(one.advantages)[1:] * log_probs).sum() / tokens
    total.backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_the_entropy_is_that_of_the_distribution_sampled_from():
    model = tiny("qwen3")
    (each,) = pack(sampled_by(model), 60, 5)
    made = PolicyGradient("dapo")
    found = made.loss(model, made.batch(each)).metrics["entropy"]
    expected = 0.0
    for one in each.experiences:
        with torch.no_grad():
            log_p = (model(torch.from_numpy(one.trajectory.ids).long()[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
        expected += float(entropy[torch.from_numpy(one.trajectory.sampled)[1:]].sum())
    assert float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_micro_batch_of_padding_has_a_graph_and_no_gradient(name):
    model = tiny("qwen3").train()
    made = recipe(name, correction=Correction())
    (empty,) = pack([], 9, 5)
    batch = made.batch(empty)
    assert made.count(batch) == 0
    found = made.loss(model, batch)
    assert float(found.total.detach()) == 0.0
    assert found.metrics.keys() == made.loss(model, made.batch(pack(sampled_by(model), 60, 5)[0])).metrics.keys()
    found.total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_against_the_rollout_the_ratio_is_its_own_correction():
    model = tiny("qwen3").train()
    given = sampled_by(model)
    made = PolicyGradient("dapo", anchor="rollout")
    swapped = [replace(one, old_log_probs=one.trajectory.rollout_log_probs) for one in given]
    loss, expected = step(PolicyGradient("dapo"), model, pack(swapped, 60, 5))
    found_loss, found = step(made, model, pack(given, 60, 5))
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert_same(found, expected)
    with pytest.raises(InvalidRun, match="anchor = rollout"):
        PolicyGradient("dapo", anchor="rollout", correction=Correction())


def test_what_the_recipe_cannot_train_on_is_refused():
    with pytest.raises(InvalidRun, match="class Pack"):
        recipe("grpo").batch(other_pack(singles()))
    given = [Experience.of(trajectory(place)) for place in range(len(LENGTHS))]
    with pytest.raises(InvalidRun, match="no reference_log_probs"):
        recipe("grpo").batch(pack(given, 60, 5)[0])
    with pytest.raises(InvalidRun, match="did you mean grpo"):
        PolicyGradient("grop")
    with pytest.raises(InvalidRun, match="max_tokens is missing"):
        PolicyGradient("dr_grpo")
