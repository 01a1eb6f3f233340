"""A run on Ray that ends in an error: what is being written is waited for, and the error stays the first."""

import time
from types import SimpleNamespace

import pytest

from bestiary.training.checkpoint import saved_steps
from bestiary.training.errors import ClusterLost, RewardFailed, RoleLost
from bestiary.training.rl.placed import finishing
from bestiary.training.rl.remote import RemotePolicy
from bestiary.training.rl.workers import PolicyWorker

from .small_policy import policy


def test_a_resume_point_that_is_being_written_is_there_when_the_error_is(tmp_path, monkeypatch):
    """A process of the policy without the process: what it hosts, asked by the methods that it has."""
    hosted = policy(tmp_path)
    write = hosted._saver._write
    monkeypatch.setattr(hosted._saver, "_write", lambda *told: (time.sleep(0.5), write(*told)))
    worker = SimpleNamespace(hosted=hosted)
    group = SimpleNamespace(
        described=[SimpleNamespace(version=0)], call=lambda name, *told: [getattr(PolicyWorker, name)(worker, *told)]
    )
    hosted.optim_step()
    hosted.save_state({"round": 1})
    with pytest.raises(RewardFailed, match="in mid-round"), finishing(RemotePolicy(group)):
        raise RewardFailed("in mid-round")
    assert saved_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RewardFailed("first"), 1),
        (KeyboardInterrupt("first"), 1),
        (RoleLost("first", role="reward"), 1),
        (RoleLost("first", role="policy"), 0),
        (ClusterLost("first"), 0),
    ],
)
def test_the_error_that_ends_a_run_stays_the_first_and_a_policy_that_is_lost_is_not_waited_for(error, asked):
    waited = []

    def finish():
        waited.append(1)
        raise RoleLost("second", role="policy")

    with pytest.raises(type(error), match="first"), finishing(SimpleNamespace(finish=finish)):
        raise error
    assert len(waited) == asked
