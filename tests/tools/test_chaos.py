"""`bestiary grpo` on Ray, one process of every role killed on the way: nothing is lost, doubled or changed by it."""

import pytest
import torch

from bestiary.models import AutoDecoder
from bestiary.tools import chaos
from bestiary.training.rl.config import load_grpo_config
from bestiary.training.rl.grpo import run

from ..training.ray_session import session as session  # the fixture

ROUNDS = chaos.FIRST + len(chaos.ROLES) + 1


def weights(out):
    return dict(AutoDecoder.from_pretrained(out / "export").named_parameters())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_fire_trains_every_prompt_once_and_is_the_run_of_one_process(session, tmp_path):
    placement = {**chaos.PLACEMENT, "policy": 1, "rollout": 1}
    file = chaos.write_run(tmp_path, ROUNDS, placement=placement)
    outcome, killer, stops = chaos.under_fire(file, chaos.ROLES, seed=1)
    assert (outcome.round, outcome.rounds, outcome.stopped, stops) == (ROUNDS, ROUNDS, None, 0)
    assert sorted(one.role for one in killer.done) == sorted(chaos.ROLES)
    counts = chaos.trained(tmp_path / "out")
    assert set(counts.values()) == {1}
    assert len(counts) == ROUNDS * chaos.PROMPTS

    alone = tmp_path / "alone"
    undisturbed = run(load_grpo_config(file, ["placement=null", f"out={alone}"]))
    assert chaos.trained(alone) == counts
    assert undisturbed.reward == pytest.approx(outcome.reward, abs=1e-9)
    for (name, ours), theirs in zip(weights(tmp_path / "out").items(), weights(alone).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=name)
