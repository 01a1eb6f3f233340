"""Answers that cannot leave a catalogue: the engine's distribution is the one that training takes gradients of."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.models.errors import InvalidInput
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.semantic_ids import SemanticIds
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.packing import pack, with_log_probs
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.records import (
    Experience,
    RecordsRefused,
    Trajectory,
    load_experiences,
    load_trajectories,
    save,
)
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rollout_check import Retokenised, WrongConstraint, WrongTemperature, check_rollouts

from ...models.tiny import VOCAB, tiny
from ..recipes_case import assert_same, step

IDS = SemanticIds(levels=3, codebook_size=5, first_id=20)
ITEMS = np.array([[0, 0, 0], [0, 0, 3], [0, 4, 1], [2, 1, 1], [2, 1, 2], [2, 3, 4], [4, 4, 4]])
CATALOGUE = Catalogue(IDS, ITEMS)
PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6], [8, 8]]
SAMPLING = Sampling(max_tokens=5, temperature=0.7, n=3, seed=1, constraint=CATALOGUE)
ROOM = {"pack_length": 32, "pad_id": 0}


def answers(model, sampling=SAMPLING):
    return EmbeddedEngine(model, rows=5).generate(PROMPTS, sampling)


def experiences(found):
    generator = np.random.default_rng(0)
    made = []
    for place, one in enumerate(found):
        of = {"prompt_id": f"p{one.prompt}", "group_id": f"p{one.prompt}", "sample": place % 3}
        record = Trajectory.of(one, PROMPTS[one.prompt], temperature=SAMPLING.temperature, **of)
        made.append(replace(Experience.of(record), advantages=generator.normal() * record.sampled))
    return made


def dense(model, record):
    """log p of each sampled token, of logits over the whole vocabulary in which the barred ones are impossible."""
    ids = torch.from_numpy(record.ids).long()
    logits, total = model(ids[None]).logits[0] / record.temperature, []
    for place in np.flatnonzero(record.sampled):
        beginning = record.ids[np.flatnonzero(record.sampled)[0] : place]
        barred = torch.ones(VOCAB, dtype=torch.bool)
        barred[torch.from_numpy(CATALOGUE.allowed(beginning)).long()] = False
        total.append(logits[place - 1].masked_fill(barred, -torch.inf).log_softmax(-1)[ids[place]])
    return torch.stack(total)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_every_answer_is_an_item_and_both_sides_agree_on_its_probability(family):
    """In float64: the engine, the trainer's packs, the check of a step, and softmax by hand."""
    model = tiny(family)
    found = answers(model)
    assert {CATALOGUE.item(one.ids) for one in found} <= set(range(len(ITEMS)))
    assert all(one.finish == "stop" and len(one) == 3 for one in found)
    scored = with_log_probs(model, experiences(found), "old_log_probs", **ROOM)
    for one, answer in zip(scored, found, strict=True):
        sampled = one.trajectory.sampled
        with torch.no_grad():
            expected = dense(model, one.trajectory).numpy()
        np.testing.assert_allclose(answer.log_probs, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(one.old_log_probs[sampled], expected, rtol=1e-9, atol=1e-9)
    assert check_rollouts(model, PROMPTS, found, SAMPLING).largest < 1e-9


def test_the_gradient_is_that_of_the_constrained_likelihood():
    model = tiny("qwen3").train()
    given = experiences(answers(model))
    tokens = sum(one.trajectory.tokens for one in given)
    _, found = step(PolicyGradient("dapo"), model, pack(given, **ROOM))
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for one in given:
        weights = torch.from_numpy(one.advantages[one.trajectory.sampled])
        total = total - (weights * dense(model, one.trajectory)).sum() / tokens
    total.backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_ratio_mismatch_and_divergence_are_nothing_for_the_weights_that_sampled():
    """And the entropy is at most that of the words allowed."""
    model = tiny("qwen3", torch.float32)
    given = with_log_probs(model, experiences(answers(model)), "reference_log_probs", **ROOM)
    made = PolicyGradient(named("grpo", aggregation="token_mean", kl_coef=0.1))
    for each in pack(given, **ROOM):
        batch = made.batch(each)
        figures, tokens = made.loss(model, batch).metrics, made.count(batch)
        assert float(figures["mismatch_mean"]) < 1e-5 * tokens
        assert float(figures["kl"]) < 1e-9 * tokens
        assert 0 < float(figures["entropy"]) <= tokens * np.log(3) + 1e-4


def test_items_come_as_often_as_the_constrained_model_says():
    model = tiny("qwen3", torch.float32)
    sampling = replace(SAMPLING, n=4096, temperature=1.0)
    found = EmbeddedEngine(model, rows=4096).generate([[5, 9, 2]], sampling)
    seen = np.bincount([CATALOGUE.item(one.ids) for one in found], minlength=len(ITEMS)) / len(found)
    told = {CATALOGUE.item(one.ids): np.exp(one.log_probs.sum()) for one in found}
    said = np.array([told.get(item, 0.0) for item in range(len(ITEMS))])
    assert said.sum() == pytest.approx(1.0, abs=1e-2)
    assert np.abs(seen - said).sum() / 2 < 0.05  # by chance 0.015


@pytest.mark.slow
@settings(max_examples=15)
@given(st.sets(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=12), st.integers(0, 99))
def test_of_any_catalogue(items, seed):
    model, catalogue = tiny("qwen3", torch.float32), Catalogue(IDS, np.array(sorted(items)))
    sampling = replace(SAMPLING, constraint=catalogue, seed=seed, n=2)
    found = answers(model, sampling)
    assert all(catalogue.item(one.ids) is not None for one in found)
    assert check_rollouts(model, PROMPTS, found, sampling).largest < 1e-4


class Pairs:
    """Words 4 and 6 in turn, or an end (9) after any of them."""

    def allowed(self, beginning):
        assert 9 not in beginning, "nobody asks what follows the end"
        return np.array([9, 6 if len(beginning) % 2 else 4, 9])


@pytest.mark.slow
def test_stop_ids_end_a_constrained_answer_and_max_tokens_cuts_it_off():
    model = tiny("qwen3", torch.float32)
    sampling = Sampling(max_tokens=3, temperature=3.0, stop_ids=(9,), n=40, constraint=Pairs())
    found = answers(model, sampling)
    assert {one.finish for one in found} == {"stop", "length"}
    for one in found:
        assert [word for word in one.ids if word != 9] == [4, 6, 4][: len(one) - (one.finish == "stop")]
        assert (one.ids[-1] == 9) == (one.finish == "stop")
    assert check_rollouts(model, PROMPTS, found, sampling).largest < 1e-4


class Counted:
    """A catalogue that keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def allowed(self, beginning):
        self.asked.append(tuple(beginning))
        return CATALOGUE.allowed(beginning)


def test_a_constraint_is_asked_about_each_beginning_once_however_many_answers_have_it():
    model, counted = tiny("qwen3", torch.float32), Counted()
    sampling = replace(SAMPLING, n=20, constraint=counted)
    found = EmbeddedEngine(model, rows=80).generate(PROMPTS, sampling)
    begun = {tuple(one.ids[:place]) for one in found for place in range(4)}
    assert sorted(counted.asked) == sorted(begun)
    counted.asked.clear()
    check_rollouts(model, PROMPTS, found, sampling)
    assert sorted(counted.asked) == sorted(one for one in begun if len(one) < 3)


def test_what_the_two_sides_make_of_it_otherwise_is_named():
    model = tiny("qwen3", torch.float32)
    found = answers(model)
    other = replace(SAMPLING, constraint=Catalogue(IDS, np.vstack([ITEMS, [[1, 1, 1]]])))
    with pytest.raises(WrongConstraint, match="token 0 of answer 0 was sampled among 3 ids, the constraint allows 4"):
        check_rollouts(model, PROMPTS, found, other)
    with pytest.raises(WrongConstraint, match="sampled under one and is trained without one"):
        check_rollouts(model, PROMPTS, found, replace(SAMPLING, constraint=None))
    with pytest.raises(WrongConstraint, match="sampled freely and is trained under a constraint"):
        check_rollouts(model, PROMPTS, [replace(one, allowed=None) for one in found], SAMPLING)
    with pytest.raises(WrongTemperature, match=r"sampled at temperature 0\.7 and are trained at 1\.2"):
        check_rollouts(model, PROMPTS, found, replace(SAMPLING, temperature=1.2))
    moved = found[0].ids.copy()
    moved[0] = 3
    with pytest.raises(Retokenised, match="token 0 of answer 0, id 3, was not allowed there"):
        check_rollouts(model, PROMPTS, [replace(found[0], ids=moved)], SAMPLING)


def test_records_keep_what_was_allowed(tmp_path):
    """Beside records that were free, and whatever their widths."""
    given = experiences(answers(tiny("qwen3", torch.float32)))
    narrow = replace(given[0].trajectory, allowed=given[0].trajectory.ids[:, None].astype(np.int32))
    free = replace(given[1].trajectory, allowed=None)
    mixed = [given[2], replace(given[0], trajectory=narrow), replace(given[1], trajectory=free)]
    save(tmp_path / "some", mixed)
    for one, other in zip(mixed, load_experiences(tmp_path / "some"), strict=True):
        assert (one.trajectory.allowed is None) == (other.trajectory.allowed is None)
        if one.trajectory.allowed is not None:
            np.testing.assert_array_equal(one.trajectory.allowed, other.trajectory.allowed)
    save(tmp_path / "others", [free])
    assert load_trajectories(tmp_path / "others")[0].allowed is None
    with pytest.raises(InvalidRun, match="allowed: answer 1 to prompt p0 has none"):
        pack(mixed, **ROOM)
    outside = given[0].trajectory.allowed.copy()
    outside[-1] = -1
    with pytest.raises(RecordsRefused, match="is not among the 0 that were allowed there"):
        replace(given[0].trajectory, allowed=outside)
    with pytest.raises(RecordsRefused, match="one row of ids for each token"):
        replace(given[0].trajectory, allowed=outside[1:])


def test_what_cannot_be_constrained_says_so():
    model = tiny("qwen3", torch.float32)
    nothing = replace(SAMPLING, constraint=Catalogue(IDS, np.zeros((0, 3), np.int64)))
    with pytest.raises(InvalidInput, match="no id that may come first"):
        answers(model, nothing)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(InvalidInput, match="without targets"):
        model(ids, allowed=torch.zeros(1, 3, 1).long())
