"""Advantages: what must not change them, what never becomes NaN, and TRL's own where definitions agree."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from trl.trainer.utils import nanstd

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.advantages import (
    combined,
    group_index,
    group_normalised,
    informative,
    leave_one_out,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reward_matrix,
    weighted_sum,
)

VALUES = st.one_of(st.none(), st.integers(-8, 8).map(lambda value: value / 4))
BATCHES = st.lists(st.tuples(st.integers(0, 3), VALUES), min_size=1, max_size=12)
EVERY = ("group", "batch", "none", "leave_one_out", "plus_plus", "plus_plus_baseline", "normalize_then_sum")


def advantages(name, batch, lengths=None):
    """(answers,), those of tokens by their first one."""
    groups = group_index([group for group, _ in batch])
    matrix = reward_matrix([[value] for _, value in batch])
    rewards = weighted_sum(matrix)
    lengths = [2 + place % 3 for place in range(len(batch))] if lengths is None else lengths
    if name == "leave_one_out":
        return leave_one_out(rewards, groups)
    if name == "plus_plus":
        return torch.stack([values[0] for values in reinforce_plus_plus(rewards, lengths)])
    if name == "plus_plus_baseline":
        return torch.stack([values[0] for values in reinforce_plus_plus_baseline(rewards, groups, lengths)])
    if name == "normalize_then_sum":
        return combined(matrix, groups, aggregate=name)
    return group_normalised(rewards, groups, scale=name)


@pytest.mark.parametrize("name", EVERY)
@given(batch=BATCHES)
@settings(max_examples=30, deadline=None)
def test_every_group_gives_finite_numbers_and_none_gives_nothing(name, batch):
    """Groups of one, of equal rewards, of None alone and mixed."""
    found = advantages(name, batch)
    assert bool(found.isfinite().all())
    for value, (_, reward) in zip(found.tolist(), batch, strict=True):
        if reward is None:
            assert value == 0.0


@pytest.mark.parametrize("name", EVERY)
@given(batch=BATCHES, shift=st.integers(-4, 4))
@settings(max_examples=30, deadline=None)
def test_shifting_the_rewards_changes_nothing(name, batch, shift):
    """Those of one group; where there are no groups, those of all answers."""
    whole = name == "plus_plus"
    moved = [
        (group, value if value is None or (group != batch[0][0] and not whole) else value + shift)
        for group, value in batch
    ]
    # Scaled by the deviation of all rewards, a group does feel where others stand.
    if name == "batch":
        moved = [(group, None if value is None else value + shift) for group, value in batch]
    torch.testing.assert_close(advantages(name, moved), advantages(name, batch), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
@given(batch=BATCHES, order=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_the_order_of_answers_changes_nothing(name, batch, order):
    lengths = [2 + place % 3 for place in range(len(batch))]
    places = list(range(len(batch)))
    order.shuffle(places)
    found = advantages(name, [batch[place] for place in places], [lengths[place] for place in places])
    torch.testing.assert_close(found, advantages(name, batch, lengths)[places], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
def test_an_unscored_answer_leaves_the_others_as_they_are(name):
    batch = [("a", 1.0), ("a", 0.0), ("b", 2.0), ("b", -1.0), ("b", 0.5)]
    found = advantages(name, [*batch, ("a", None), ("c", None)], [2, 3, 4, 2, 3, 5, 5])
    torch.testing.assert_close(found[:5], advantages(name, batch, [2, 3, 4, 2, 3]), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["group", "none", "leave_one_out", "plus_plus_baseline"])
def test_groups_of_one_and_groups_of_equal_rewards_say_exactly_nothing(name):
    """0.1 three times has another mean than 0.1: divided by eps its rounding would be an advantage."""
    batch = [("equal", 0.1), ("equal", 0.1), ("equal", 0.1), ("alone", 7.0), ("two", 1.0), ("two", 0.0)]
    found = advantages(name, batch)
    if name == "plus_plus_baseline":  # whitening moves all of them alike
        assert len(set(found[:4].tolist())) == 1
    else:
        assert found[:4].tolist() == [0.0] * 4
    groups = group_index([group for group, _ in batch])
    rewards = torch.tensor([value for _, value in batch])
    assert informative(rewards, groups).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_with_unscored_answers_are_those_of_trl(scale):
    """TRL's lines, which are no function: two groups of four, eps 1e-4. Its `nanstd` corrects in float32."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    rewards[1, 0] = rewards[5] = rewards[6, 1] = math.nan
    weights, groups = [0.7, 1.6], group_index([0] * 4 + [1] * 4)
    total = (rewards * torch.tensor(weights, dtype=torch.float64)).nansum(1)
    total[5] = math.nan
    centred = total - total.view(-1, 4).nanmean(1).repeat_interleave(4)
    spread = nanstd(total.view(-1, 4), dim=1).repeat_interleave(4) if scale == "group" else nanstd(total)
    expected = (centred if scale == "none" else centred / (spread + 1e-4)).nan_to_num(nan=0.0)
    found = combined(rewards, groups, weights=weights, scale=scale, eps=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_functions_normalised_one_by_one_are_those_of_trl():
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    rewards[2, 0] = rewards[5] = math.nan
    weights, groups = [0.5, 2.0, 1.0], group_index([0] * 4 + [1] * 4)
    grouped = rewards.view(2, 4, 3)
    each = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    total = (each.view(8, 3) * torch.tensor(weights, dtype=torch.float64)).nansum(1)
    total[5] = math.nan
    expected = ((total - total.nanmean()) / (nanstd(total) + 1e-4)).nan_to_num(nan=0.0)
    found = combined(rewards, groups, weights=weights, aggregate="normalize_then_sum", eps=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_punishment_of_long_answers_begins_at_the_cache_and_ends_at_the_limit():
    found = overlong_penalty(torch.tensor([0, 80, 90, 100, 120]), max_tokens=100, cache=20, factor=2.0)
    assert found.tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(InvalidRun, match="reward 1 of answer 2"):
        reward_matrix([[0.0, 1.0], [None, 1.0], [0.5, value]])


def test_weights_for_other_functions_are_refused():
    with pytest.raises(InvalidRun, match="1 for 2 functions"):
        weighted_sum(torch.zeros(3, 2), [1.0])
