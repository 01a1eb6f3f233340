"""Rollout engines, reward functions and environments as actors of Ray: spread, synced, killed and started again."""

import importlib.util
import os
import pickle
import signal
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bestiary.training.errors import InvalidRun, RoleLost
from bestiary.training.integrations.needs import MissingLibrary
from bestiary.training.rl import groups, remote_engine
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.groups import Group, Pool
from bestiary.training.rl.remote_engine import RolloutGroup
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.standalone import StandaloneEngine
from bestiary.training.rl.weight_sync import SyncFailed, sync
from bestiary.training.rl.workers import RolloutWorker

from ..ray_session import session as session  # the fixture
from .small_checkpoint import PROMPTS, small, stored

pytestmark = pytest.mark.slow
SAMPLING = Sampling(max_tokens=6, temperature=1.3, stop_ids=(3, 40, 90), n=2, seed=4)


@pytest.fixture(scope="module")
def rollouts(session, tmp_path_factory):
    folder = stored(tmp_path_factory.mktemp("start") / "start")
    pool = Pool(2, roles=2)
    group = Group(
        "rollout",
        RolloutWorker,
        partial(StandaloneEngine, folder, version=None),
        size=2,
        pool=pool,
        threads=2,
        timeout_s=200,
    )
    yield group
    group.close()
    pool.close()


@pytest.fixture
def engine(rollouts):
    return RolloutGroup(rollouts, bucket_bytes=5000)


def same(said, expected):
    assert [one.prompt for one in said] == [one.prompt for one in expected]
    for one, other in zip(said, expected, strict=True):
        assert np.array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-9)


def test_spread_engines_answer_as_one_and_a_killed_one_is_replaced_alone(engine, rollouts):
    """After every sync, verified to the last tensor of both; the one that lives goes on living."""
    policy = small(seed=1)
    with pytest.raises(SyncFailed, match="sync"):
        engine.generate(PROMPTS, SAMPLING)
    found = sync(policy, engine, 1)
    assert set(found.read) == set(engine.shapes)
    assert found.parity.tokens == 2 * 2 * 8  # of each engine
    keys = list("abcd")
    expected = EmbeddedEngine(policy).generate(PROMPTS, SAMPLING, keys=keys)
    same(engine.generate(PROMPTS, SAMPLING, keys=keys), expected)
    same(
        engine.alone(1).generate(PROMPTS[1:], replace(SAMPLING, n=1), keys=keys[1:]),
        [replace(one, prompt=one.prompt - 1) for one in expected[2::2]],
    )

    pids = rollouts.call("ping")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RoleLost, match=r"process 1 of 2 of role rollout died") as caught:
        engine.generate(PROMPTS, SAMPLING)
    assert caught.value.role == "rollout"
    engine.restart()
    engine.restart()
    assert rollouts.generations == [1, 2]
    now = rollouts.call("ping")
    assert (now[0], now[1] != pids[1]) == (pids[0], True)
    with pytest.raises(SyncFailed):
        _ = engine.version
    sync(policy, pickle.loads(pickle.dumps(engine)), 1)  # as from another process
    engine.synced(1)
    same(engine.generate(PROMPTS, SAMPLING, keys=keys), expected)


def test_a_sync_that_breaks_off_half_way_leaves_no_engine_with_weights(engine, monkeypatch):
    policy = small(seed=2)
    sync(policy, engine, 1)
    made = remote_engine.buckets

    def broken(tensors, most):
        for number, bucket in enumerate(made(tensors, most)):
            if number == 3:
                raise RoleLost("the policy is gone.", role="policy")
            yield bucket

    with monkeypatch.context() as patch:
        patch.setattr(remote_engine, "buckets", broken)
        with pytest.raises(RoleLost):
            sync(policy, engine, 2)
    with pytest.raises(SyncFailed):
        _ = engine.version
    with pytest.raises(SyncFailed, match="no weights of any version"):
        engine.generate(PROMPTS, SAMPLING)
    assert sync(policy, engine, 2).version == engine.version == 2


def test_errors_cross_the_border_as_themselves(engine):
    sync(small(seed=1), engine, 1)
    with pytest.raises(InvalidRun, match=r"prompt 0 of 1 has 64 tokens") as caught:
        engine.generate([[1] * 64], SAMPLING)
    assert type(caught.value) is InvalidRun
    assert "max_tokens" in caught.value.remedy


def test_a_process_that_does_not_answer_is_lost(rollouts, engine):
    sync(small(seed=1), engine, 1)
    patient = replace(engine.members, timeout_s=1.0)
    pid = rollouts.call("ping")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RoleLost, match=r"rollout process 0 of 2 did not answer in 1 s"):
            patient.every("ping")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert rollouts.call("ping")[0] == pid


def test_what_the_cluster_has_no_room_for_is_refused(session):
    with pytest.raises(InvalidRun, match=r"9 places for 1 roles need 9 CPUs of Ray; it has 8"):
        Pool(9, roles=1)
    with pytest.raises(InvalidRun, match=r"2 nodes with 1 CPUs each, and Ray has 1 such among its 1"):
        Pool(1, roles=1, nodes=2)


@pytest.mark.parametrize(
    ("missing", "said", "install"),
    [("ray", "ray is not installed", "bestiary[ray]"), ("verl.plugin.platform", "verl is not installed", "verl.txt")],
)
def test_without_ray_or_verl_one_error_says_how_to_install_it(monkeypatch, missing, said, install):
    monkeypatch.setitem(sys.modules, missing, None)
    spec = importlib.util.spec_from_file_location("groups_without", groups.__file__)
    with pytest.raises(MissingLibrary, match=said) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert install in caught.value.remedy
