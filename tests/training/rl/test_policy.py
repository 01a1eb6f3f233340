"""The policy's primitives: one step however it is cut, resume points with all they must hold, what is skipped."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bestiary.training.config import LoopSection
from bestiary.training.control import Control
from bestiary.training.errors import Diverged, InvalidRun
from bestiary.training.rl import policy as rl_policy
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.mismatch import parity
from bestiary.training.rl.packing import pack
from bestiary.training.rl.policy import LocalFrozen, Room
from bestiary.training.rl.records import Experience, Trajectory
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rollout_check import Retokenised, StaleWeights, WrongTemperature

from .experiences import sampled_by, trajectory
from .small_policy import policy, weights

PROMPTS = ([3, 17, 40], [99, 5])
SAMPLING = Sampling(max_tokens=6, temperature=0.8, n=3)


def answers(made, sampling=SAMPLING):
    return [
        Trajectory.of(
            one,
            PROMPTS[one.prompt],
            prompt_id=f"p{one.prompt}",
            group_id=f"p{one.prompt}",
            sample=place % sampling.n,
            temperature=sampling.temperature,
        )
        for place, one in enumerate(made.sample(PROMPTS, sampling))
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_a_step_is_the_same_in_one_call_and_in_many(algorithm):
    """Packs of other sizes, calls of one and of several answers, one of them without anything trained."""
    whole, parts = policy(algorithm=algorithm), policy(algorithm=algorithm, room=Room(15, 7))
    given = sampled_by(whole.model)
    figures = whole.forward_backward(given)
    for few in (given[:1], given[1:4], [replace(given[0], trained=False)], given[4:]):
        parts.forward_backward(few)
    one, other = whole.optim_step(), parts.optim_step()
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
    assert figures["loss"] == pytest.approx(one["loss"], rel=1e-12)
    for (name, ours), theirs in zip(weights(whole).items(), weights(parts).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])  # of sequences, and of tokens
def test_the_gradient_of_a_step_is_that_of_the_mean_over_its_units(algorithm):
    """Also where no optimiser and no clipping would tell another divisor."""
    made, plain = policy(algorithm=algorithm), policy(algorithm=algorithm)
    given = sampled_by(made.model)
    recipe = plain.trainer.recipe
    batches = [recipe.batch(each) for each in pack(given, 64, 0)]
    units = sum(recipe.count(batch) for batch in batches)
    assert units > 1
    (sum(recipe.loss(plain.model, batch).total for batch in batches) / units).backward()
    norm = torch.stack([one.grad.square().sum() for one in plain.model.parameters() if one.grad is not None]).sum()
    made.forward_backward(given)
    assert made.optim_step()["grad_norm"] == pytest.approx(float(norm.sqrt()), rel=1e-9)


def test_a_resumed_policy_is_the_one_that_was_saved(tmp_path):
    """Weights, states, generators, version, what the controller said, and the names of the prompts trained."""
    first = policy(tmp_path, lora=True)
    given = sampled_by(first.model)
    first.forward_backward(given[:3])
    first.optim_step()
    torch.rand(3)
    first.save_state({"round": 1, "waiting": ["p7"]}, wait=True)
    drawn = torch.rand(1)
    first.forward_backward(given)
    first.optim_step()

    second = policy(tmp_path, lora=True)
    second.forward_backward(given)  # of a step that was never made: gone
    assert second.load_state() == {"round": 1, "waiting": ["p7"]}
    assert (second.version, second.trained()) == (1, {"p0": 1})
    assert torch.equal(torch.rand(1), drawn)
    second.forward_backward(given)
    second.optim_step()
    assert second.trained() == first.trained() == {"p0": 2, "p1": 1}
    for (name, ours), theirs in zip(weights(first).items(), weights(second).values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_without_a_resume_point_nothing_is_loaded(tmp_path):
    assert policy(tmp_path).load_state() is None
    assert policy().load_state() is None


def test_a_step_with_nothing_to_train_on_is_skipped_and_counted_and_such_steps_are_bounded():
    made = policy(loop=LoopSection(max_skips=2))
    before = weights(made)
    given = [replace(one, trained=False) for one in sampled_by(made.model)]
    for step in (1, 2):
        assert made.forward_backward(given) == {}
        assert made.optim_step()["skipped"] == step
        assert made.version == step
    made.forward_backward(given)
    with pytest.raises(InvalidRun, match=r"3 steps in a row had nothing to train on: every group's rewards"):
        made.optim_step()
    assert made.trained() == {"p0": 3, "p1": 3}
    assert all(torch.equal(before[name], value) for name, value in weights(made).items())


def test_a_gradient_that_is_not_finite_moves_nothing():
    made = policy()
    given = sampled_by(made.model)
    made.forward_backward(given)
    next(made.model.parameters()).grad[0] = math.nan
    before = weights(made)
    with pytest.raises(Diverged, match="step 1: the norm of the gradients is nan"):
        made.optim_step()
    assert all(torch.equal(before[name], value) for name, value in weights(made).items())


def test_its_own_answers_agree_with_it_after_a_sync():
    made = policy(flat=True)
    engine = EmbeddedEngine(made.model)
    made.version = 4
    assert made.sync(engine).version == engine.version == 4
    figures = made.check(answers(made))
    assert figures["rl/mismatch_max"] < 1e-9
    assert figures["rl/mismatch_mult_error"] == pytest.approx(1.0, abs=1e-9)


def changed(one, **changes):
    return [replace(each, **changes) for each in one]


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        (WrongTemperature, lambda one: replace(one, temperature=1.3)),
        (Retokenised, lambda one: replace(one, ids=np.where(np.arange(len(one)) == 5, one.ids ^ 1, one.ids))),
        (StaleWeights, lambda one: replace(one, rollout_log_probs=one.rollout_log_probs - 0.3 * one.sampled)),
    ],
)
def test_answers_that_are_off_are_told_by_name(wrong, change):
    made = policy()
    with pytest.raises(wrong):
        made.check([change(one) for one in answers(made)])


def test_what_a_check_computed_is_the_log_probabilities_before_the_step_and_not_after_it(monkeypatch):
    made = policy(flat=True)
    given = answers(made)
    blank = [Experience.of(one) for one in given]
    fresh = policy(flat=True).log_probs(blank, "old_log_probs")
    made.check(given)
    calls = []
    forward = made.model.forward
    monkeypatch.setattr(made.model, "forward", lambda *args, **more: calls.append(1) or forward(*args, **more))
    for one, other in zip(made.log_probs(blank, "old_log_probs"), fresh, strict=True):
        np.testing.assert_array_equal(one.old_log_probs, other.old_log_probs)
    assert not calls
    made.log_probs([replace(blank[0], trajectory=replace(given[0], temperature=0.5))], "old_log_probs")
    assert calls
    made.forward_backward([replace(one, advantages=1.0 * one.trajectory.sampled) for one in blank[:2]])
    made.optim_step()
    moved = made.log_probs(blank, "old_log_probs")
    assert not np.array_equal(moved[0].old_log_probs, fresh[0].old_log_probs)


def test_all_answers_of_a_step_are_compared_at_once(monkeypatch):
    made, calls = policy(), []
    given = answers(made)
    monkeypatch.setattr(rl_policy, "parity", lambda *columns: calls.append(len(columns[0])) or parity(*columns))
    figures = made.check([*given, replace(given[0], sample=9, version=-1)])
    assert calls == [sum(map(len, given)) + len(given[0]), sum(map(len, given))]  # all, and those of these weights
    assert figures["rl/mismatch_max"] < 1e-9


def test_what_one_process_of_a_policy_finds_wrong_is_raised_in_all_of_them():
    class Two(Control):
        def gathered(self, value):
            other = (None, StaleWeights("the other's answers are stale.")) if isinstance(value, tuple) else value
            return [value, other]

    made = policy()
    made.trainer.control = Two()
    with pytest.raises(StaleWeights, match="the other's answers are stale"):
        made.check(answers(made))


def test_a_process_that_has_no_wrong_answer_looks_at_those_of_the_others():
    """Else the others, who compute with what all processes hold, would wait for it."""
    made = policy()
    off = [replace(one, rollout_log_probs=one.rollout_log_probs - 0.3 * one.sampled) for one in answers(made)]
    theirs = made._parity(made.log_probs([Experience.of(one) for one in off], "old_log_probs"))

    class Two(Control):
        def gathered(self, value):
            return [value, off if isinstance(value, list) else (theirs, None)]

    made.trainer.control = Two()
    with pytest.raises(StaleWeights, match="worst is token"):
        made.check([])


def test_answers_of_an_earlier_version_may_differ_and_are_measured():
    made = policy()
    given = answers(made)
    made.version = 1
    off = [replace(one, rollout_log_probs=one.rollout_log_probs - 0.3 * one.sampled) for one in given]
    assert made.check(off)["rl/mismatch_mean"] > 0.1


def test_turns_of_a_conversation_are_checked_each_behind_what_came_before_it():
    made = policy()
    first = made.sample([[3, 17, 40]], replace(SAMPLING, n=1))[0]
    before = [3, 17, 40, *first.ids.tolist(), 9, 8]
    second = made.sample([before], replace(SAMPLING, n=1))[0]
    ids = np.array([*before, *second.ids.tolist()], np.int32)
    values = np.concatenate([np.zeros(3), first.log_probs, np.zeros(2), second.log_probs])
    sampled = np.array([False] * 3 + [True] * len(first) + [False] * 2 + [True] * len(second))
    talk = trajectory(0, ids=ids, sampled=sampled, rollout_log_probs=values, temperature=0.8, version=0)
    assert made.check([talk])["rl/mismatch_max"] < 1e-9
    with pytest.raises(StaleWeights, match="of the engine and the policy differ"):
        made.check([replace(talk, rollout_log_probs=values - 0.3 * sampled)])


def test_a_reference_is_the_policy_without_its_adapters():
    made = policy(lora=True)
    given = [Experience.of(one.trajectory) for one in sampled_by(made.model)]
    bare = policy()
    ours = LocalFrozen(made.model, made.room, without_adapters=True).log_probs(given, "reference_log_probs")
    theirs = LocalFrozen(bare.model, bare.room).log_probs(given, "reference_log_probs")
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.reference_log_probs, other.reference_log_probs, rtol=0, atol=1e-12)


def test_the_unit_is_the_algorithms():
    assert policy(algorithm=named("dapo")).trainer.recipe.unit == "tokens"
