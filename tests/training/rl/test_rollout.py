"""What every rollout engine is asked with."""

import pytest

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.rollout import Sampling, check_prompts, seed_of


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top_p": 0.9}, r"top_p = 0\.9 in sampling for training"),
        ({"top_k": 40}, "top_k = 40 in sampling for training"),
        ({"temperature": 0.0}, r"temperature = 0\.0"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"n": 0}, "n = 0"),
    ],
)
def test_sampling_that_training_cannot_use_is_refused_by_name(given, said):
    with pytest.raises(InvalidRun, match=said):
        Sampling(**{"max_tokens": 4} | given)


@pytest.mark.parametrize(("prompts", "said"), [([[1], []], "prompt 1 of 2 is empty"), ([[1] * 9], "prompt 0 of 1")])
def test_a_prompt_that_cannot_be_answered_is_refused_by_its_place(prompts, said):
    check_prompts([[1] * 8], Sampling(max_tokens=2), context=10)
    with pytest.raises(InvalidRun, match=said):
        check_prompts(prompts, Sampling(max_tokens=2), context=10)


def test_seeds_depend_on_every_part_and_its_place():
    seeds = {seed_of(*parts) for parts in ((0, 1), (1, 0), (0, "1"), (0, 1, 0), ((0, 1),))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
