"""Shares of the mixture are those asked for, and every choice is a function of the seed and the draw."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.mixing import Mixer, Stage, check_schedule
from bestiary.training.data.randomness import BLOCK, Draws, permutation

WEIGHTS = {"a": 5.0, "b": 3.0, "c": 0.0, "d": 2.0}


def mixer(*stages: Stage, by: str = "document", seed: int = 0, stream: int = 0, streams: int = 1) -> Mixer:
    return Mixer(stages, by, seed=seed, stream=stream, streams=streams)  # type: ignore[arg-type]


@given(draws=st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=30))
def test_a_number_does_not_depend_on_those_drawn_before(draws: list[int]) -> None:
    used = Draws(7, "x")
    assert [used[draw] for draw in draws] == [Draws(7, "x")[draw] for draw in draws]
    assert all(0 <= used[draw] < 1 for draw in draws)


def test_numbers_of_different_keys_and_counters_differ() -> None:
    first, second = Draws(0, "mixture", 1), Draws(0, "mixture", 2)
    numbers = [first[k] for k in range(3 * BLOCK)] + [second[k] for k in range(3 * BLOCK)]
    assert len(set(numbers)) == 6 * BLOCK
    assert abs(np.mean(numbers) - 0.5) < 0.02


@given(length=st.integers(0, 50), epoch=st.integers(0, 5))
def test_a_permutation_is_one(length: int, epoch: int) -> None:
    assert sorted(permutation(length, 3, epoch)) == list(range(length))


def test_document_shares_follow_the_weights() -> None:
    choices = [mixer(Stage(0, WEIGHTS)).choose(draw, WEIGHTS) for draw in range(4000)]
    for name, weight in WEIGHTS.items():
        assert abs(choices.count(name) / 4000 - weight / 10) < 0.02
    assert "c" not in choices


@pytest.mark.slow
@given(st.lists(st.integers(1, 50), min_size=200, max_size=200), st.sampled_from([1.0, 0.05]))
def test_token_shares_are_right_to_within_a_document(lengths: list[int], small: float) -> None:
    """Whatever the lengths: the documents of `a` are ten times as long here."""
    mix, tokens = mixer(Stage(0, {"a": 1.0, "b": small}), by="token"), {"a": 0, "b": 0}
    for draw, length in enumerate(lengths):
        name = mix.choose(draw, tokens)
        assert name is not None
        length *= 10 if name == "a" else 1
        mix.charge(draw, tokens, name, length)
        tokens[name] += length
    total = sum(tokens.values())
    assert abs(tokens["a"] - total / (1 + small)) <= 500


def test_the_order_of_sources_changes_nothing() -> None:
    forwards, backwards = list(WEIGHTS), list(WEIGHTS)[::-1]
    one, other = mixer(Stage(0, WEIGHTS)), mixer(Stage(0, dict(reversed(WEIGHTS.items()))))
    assert [one.choose(k, forwards) for k in range(200)] == [other.choose(k, backwards) for k in range(200)]


def test_a_source_that_is_over_leaves_its_share_to_the_others() -> None:
    mix = mixer(Stage(0, WEIGHTS))
    assert mix.shares(0, {"a", "d"}) == {"a": 5 / 7, "d": 2 / 7}
    assert mix.choose(0, {"c"}) is None
    assert mix.choose(0, set()) is None


def test_a_schedule_holds_jumps_and_ramps() -> None:
    """Its steps count the draws of all streams together."""
    mix = mixer(
        Stage(0, {"a": 1.0}), Stage(100, {"a": 1.0, "b": 1.0}, ramp=True), Stage(200, {"a": 1.0, "b": 3.0}), streams=2
    )
    both = {"a", "b"}
    assert mix.shares(49, both) == {"a": 1.0}
    assert mix.shares(50, both) == {"a": 0.5, "b": 0.5}
    assert mix.shares(75, both) == {"a": 1 / 3, "b": 2 / 3}
    assert mix.shares(100, both) == mix.shares(5000, both) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ([Stage(5, {"a": 1.0})], r"stages start at \[5\]"),
        ([Stage(0, {"a": 1.0}), Stage(0, {"a": 2.0})], r"stages start at \[0, 0\]"),
        ([Stage(0, {"x": 1.0})], "weighs 'x'"),
        ([Stage(0, {"a": -1.0})], r"weights \{'a': -1.0\}"),
        ([Stage(0, {"a": 0.0})], r"weights \{'a': 0.0\}"),
        ([Stage(0, {"a": 1.0}, ramp=True)], "ramp = True"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(stages: list[Stage], named: str) -> None:
    with pytest.raises(InvalidPlan, match=named):
        check_schedule(stages, {"a", "b"})
