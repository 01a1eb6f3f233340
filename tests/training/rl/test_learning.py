"""From an engine's answers to weights that earn more: every record, sign and column on the way."""

import numpy as np
import pytest
import torch

from bestiary.training.rl.algorithms import named
from bestiary.training.rl.assess import assess
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.mismatch import Correction, parity
from bestiary.training.rl.packing import pack, with_log_probs
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.records import Experience, Trajectory
from bestiary.training.rl.rollout import Sampling, seed_of

from ...models.tiny import tiny

PROMPTS = ([3, 17, 40], [99, 5], [150, 7, 8, 9])
ROOM = {"pack_length": 48, "pad_id": 0}


def even(ids):
    """The share of even ids in an answer."""
    return float(np.mean(ids % 2 == 0))


def sampled(engine, step):
    """Answers to all prompts, with their rewards."""
    sampling = Sampling(max_tokens=6, temperature=0.8, n=8, seed=seed_of(0, step))
    found = []
    for place, answer in enumerate(engine.generate(PROMPTS, sampling)):
        prompt = f"p{answer.prompt}"
        made = Trajectory.of(
            answer,
            PROMPTS[answer.prompt],
            prompt_id=prompt,
            group_id=f"{prompt}/{step}",
            sample=place % sampling.n,
            temperature=sampling.temperature,
            rewards={"even": even(answer.ids)},
        )
        found.append(Experience.of(made))
    return found


def undecided():
    """Whose words are nearly equally likely, so that answers to a prompt differ."""
    model = tiny("qwen3", torch.float32)
    model.lm_head.weight.data.mul_(0.05)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus"])
def test_rewards_rise(name):
    """Two updates on every batch of answers, the second off policy."""
    algorithm = named(name)
    recipe = PolicyGradient(algorithm, correction=Correction())
    model, reference = undecided().train(), undecided()
    engine, optimiser = EmbeddedEngine(model), torch.optim.Adam(model.parameters(), lr=1e-2)
    earned = []
    for step in range(8):
        given = with_log_probs(model, sampled(engine, step), "old_log_probs", **ROOM)
        for one in given:
            old, rollout, where = (
                torch.from_numpy(values)
                for values in (one.old_log_probs, one.trajectory.rollout_log_probs, one.trajectory.sampled)
            )
            assert parity(old, rollout, where).figures()["mismatch/max"] < 1e-4
        if algorithm.objective.kl_coef or algorithm.advantage.kl_coef:
            given = with_log_probs(reference, given, "reference_log_probs", **ROOM)
        made, figures = assess(given, algorithm)
        earned.append(figures["reward"])
        packs = pack(made, **ROOM)
        for _ in range(2):
            batches = [recipe.batch(each) for each in packs]
            units = sum(recipe.count(each) for each in batches)
            for each in batches:
                (recipe.loss(model, each).total / units).backward()
            optimiser.step()
            optimiser.zero_grad()
    assert np.mean(earned[-2:]) > earned[0] + 0.3, earned
