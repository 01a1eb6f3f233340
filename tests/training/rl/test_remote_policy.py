"""A policy of two ranks on Ray takes the steps of one process; what dies is named, restarted, and goes on."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from bestiary.models import AutoDecoder
from bestiary.training.checkpoint import Checkpoints, saved_steps
from bestiary.training.config import CheckpointSection, LoopSection, OptimSection
from bestiary.training.control import Control
from bestiary.training.errors import InvalidRun, RewardFailed, RoleLost
from bestiary.training.loop import Trainer
from bestiary.training.optim import Optimisers
from bestiary.training.parallel import build_mesh, clip_grad_norm, data_parallel, parallelize
from bestiary.training.processes import processes
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.groups import Group, Pool
from bestiary.training.rl.placed import finishing
from bestiary.training.rl.policy import Account, LocalPolicy, Room
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.records import Experience
from bestiary.training.rl.remote import RemoteEnvironments, RemotePolicy, RemoteScorer
from bestiary.training.rl.remote_engine import RolloutGroup
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.standalone import StandaloneEngine
from bestiary.training.rl.workers import (
    EnvironmentWorker,
    PolicyWorker,
    RewardWorker,
    RolloutWorker,
)

from .experiences import PACK, sampled_by, trajectory
from .small_checkpoint import PROMPTS, stored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SAMPLING = Sampling(max_tokens=6, temperature=0.8, n=2, seed=4)


@contextmanager
def local_policy(src, out):
    """In this process, or as one of the ranks that the environment names."""
    with processes(60) as here:
        yield policy_of(src, out, here)


class Slowly(Checkpoints):
    """Resume points that take their time."""

    def _write(self, *told):
        time.sleep(1)
        super()._write(*told)


def policy_of(src, out, here):
    mesh = build_mesh()
    data = data_parallel(mesh)
    model = AutoDecoder.from_pretrained(src, mesh=partial(parallelize, mesh=mesh) if here.size > 1 else None)
    optim = OptimSection(lr=3e-3, schedule="constant", warmup=0)
    trainer = Trainer(
        model=model,
        recipe=PolicyGradient("grpo", entropy=False),
        loader=Account(),
        optimiser=Optimisers(model, optim, 3e-3),
        steps=9,
        per_step=0,
        loop=LoopSection(steps=9),
        optim=optim,
        lr=3e-3,
        control=Control(here.control),
        data_rank=data.rank,
        data_parallel=data.size,
        clip=clip_grad_norm,
    )
    saver = Slowly(out, CheckpointSection(), {"recipe": "policy_gradient"}, group=here.saving)
    room = Room(PACK["pack_length"], PACK["pad_id"], agree=data.largest if data.size > 1 else None)
    return LocalPolicy(trainer, room, saver=saver)


class Lengths:
    """A `Scorer` by the number of ids, which refuses a prompt of its dislike."""

    def __init__(self):
        self.scored = 0

    def score(self, trajectories):
        if any(one.prompt_id == "bad" for one in trajectories):
            raise RewardFailed("1 of 1 answers had no reward.", remedy="see the function")
        self.scored += len(trajectories)
        return [
            replace(one, rewards={"length": float(len(one)), "process": float(os.getpid())}) for one in trajectories
        ]

    def figures(self):
        found, self.scored = {"reward/errors": float(self.scored)}, 0
        return found


class Adder:
    """An `Environment` that says how often it was spoken to."""

    def __init__(self):
        self.turns = 0

    def reset(self, prompt, *, seed):
        return [*prompt.ids, seed]

    def step(self, said):
        if said.ids == (0,):
            raise KeyError("nothing")
        self.turns += 1
        return Heard(ids=(self.turns,), extra={"pid": os.getpid()})

    def cut_off(self):
        return {"turns": float(self.turns)}

    def close(self):
        """Nothing."""


@pytest.fixture(scope="module", autouse=True)
def session():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def groups(session, tmp_path_factory):
    """Policy and engine share two places; environments and rewards have places of their own."""
    folder = tmp_path_factory.mktemp("remote")
    src = stored(folder / "start")
    pool, other = Pool(2, roles=2), Pool(2, roles=1)
    made = {
        "policy": Group(
            "policy",
            PolicyWorker,
            partial(local_policy, src, folder / "out"),
            size=2,
            pool=pool,
            together=True,
            timeout_s=200,
        ),
        "rollout": Group(
            "rollout",
            RolloutWorker,
            partial(StandaloneEngine, src, version=None),
            size=1,
            pool=pool,
            threads=2,
            timeout_s=200,
        ),
        "reward": Group("reward", RewardWorker, Lengths, size=2, pool=other, timeout_s=200),
        "environment": Group("environment", EnvironmentWorker, Adder_factory, size=1, pool=other, timeout_s=200),
    }
    yield src, made
    for group in made.values():
        group.close()
    pool.close()
    other.close()


def Adder_factory():
    return Adder


def weights(policy, folder):
    policy.export(folder)
    return dict(AutoDecoder.from_pretrained(folder).named_parameters())


def close(found, expected):
    for (name, ours), theirs in zip(found.items(), expected.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=name)


def test_two_ranks_step_as_one_process_and_go_on_after_a_kill(groups, tmp_path):
    """Figures, log-probabilities, answers, weights, and the names of what was trained; the resume point holds them."""
    src, made = groups
    remote, engine = RemotePolicy(made["policy"]), RolloutGroup(made["rollout"], bucket_bytes=5000)
    with processes(60) as here:
        local = policy_of(src, tmp_path / "out", here)
        stepped(made, remote, engine, local, tmp_path)


def stepped(made, remote, engine, local, tmp_path):
    given = [replace(one, reference_log_probs=None) for one in sampled_by(local.model)]
    blank = [Experience.of(one.trajectory) for one in given]
    asked = (one.log_probs(blank, "old_log_probs") for one in (remote, local))
    for one, other in zip(*asked, strict=True):
        assert one.trajectory.name == other.trajectory.name
        np.testing.assert_allclose(one.old_log_probs, other.old_log_probs, rtol=0, atol=1e-9)
    for few in (given[:1], given[1:]):  # one rank has nothing of the first
        figures, expected = remote.forward_backward(few), local.forward_backward(few)
        assert figures.keys() == expected.keys()
        assert figures == pytest.approx(expected, rel=1e-9, abs=1e-12)
    found, expected = remote.optim_step(), local.optim_step()
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
    assert (remote.version, remote.trained()) == (1, {"p0": 1, "p1": 1})
    close(weights(remote, tmp_path / "one"), dict(local.model.named_parameters()))

    synced = remote.sync(engine)
    assert (synced.version, engine.version, set(synced.read)) == (1, 1, set(engine.shapes))
    answers = EmbeddedEngine(local.model).generate(PROMPTS, SAMPLING, keys=list("abcd"))
    for said in (remote.sample(PROMPTS, SAMPLING, keys=list("abcd")), engine.generate(PROMPTS, SAMPLING, keys="abcd")):
        for one, other in zip(said, answers, strict=True):
            assert (one.prompt, one.version) == (other.prompt, 1)
            assert np.array_equal(one.ids, other.ids)

    remote.save_state({"round": 1}, wait=True)
    remote.forward_backward(given)
    remote.optim_step()
    os.kill(made["policy"].call("ping")[1], signal.SIGKILL)
    with pytest.raises(RoleLost, match="role policy died") as caught:
        remote.forward_backward(given)
    assert caught.value.role == "policy"
    remote.restart()
    assert (remote.version, remote.trained()) == (0, {})
    assert remote.load_state() == {"round": 1}
    assert (remote.version, remote.trained()) == (1, {"p0": 1, "p1": 1})
    close(weights(remote, tmp_path / "again"), dict(local.model.named_parameters()))
    assert remote.sync(engine).version == engine.version == 1


def test_an_error_in_mid_round_comes_behind_the_resume_point_that_is_being_written(groups):
    src, made = groups
    remote, saved = RemotePolicy(made["policy"]), Path(src).parent / "out"
    remote.optim_step()
    remote.save_state({"round": remote.version})
    with pytest.raises(RewardFailed, match="in mid-round"), finishing(remote):
        raise RewardFailed("in mid-round")
    assert remote.version in saved_steps(saved)


def test_an_engine_that_dies_in_a_sync_is_named_and_the_policy_goes_on(groups, tmp_path):
    """No rank is left waiting for another."""
    remote, engine = RemotePolicy(made := groups[1]["policy"]), RolloutGroup(groups[1]["rollout"])
    os.kill(groups[1]["rollout"].call("ping")[0], signal.SIGKILL)
    with pytest.raises(RoleLost) as caught:
        remote.sync(engine)
    assert caught.value.role == "rollout"
    engine.restart()
    assert remote.sync(engine).version == engine.version
    assert made.dead() == []
    with pytest.raises(InvalidRun, match="policy in processes of its own"):
        remote.sync(EmbeddedEngine(None))


def test_scorers_keep_groups_together_and_raise_what_is_raised_there(groups):
    scorer = RemoteScorer(groups[1]["reward"])
    given = [trajectory(place) for place in (0, 3, 1, 4, 2, 5)]
    found = scorer.score(given)
    assert [one.name for one in found] == [one.name for one in given]
    homes = {one.group_id: set() for one in found}
    for one in found:
        assert one.rewards["length"] == len(one)
        homes[one.group_id].add(one.rewards["process"])
    assert sorted(map(len, homes.values())) == [1, 1]
    assert len(set.union(*homes.values())) == 2
    assert scorer.figures() == {"reward/errors": 6.0}
    with pytest.raises(RewardFailed, match="1 of 1 answers had no reward"):
        scorer.score([replace(given[0], prompt_id="bad")])
    os.kill(groups[1]["reward"].call("ping")[0], signal.SIGKILL)
    with pytest.raises(RoleLost) as caught:
        scorer.score(given)
    assert caught.value.role == "reward"
    scorer.restart()
    assert [one.rewards["length"] for one in scorer.score(given)] == [float(len(one)) for one in given]


def test_an_environment_plays_where_it_is_and_begins_again_after_a_kill(groups):
    environments = RemoteEnvironments(groups[1]["environment"])
    prompt = Prompt(prompt_id="p", ids=(4, 5))
    one, other = environments(), environments()
    assert [*one.reset(prompt, seed=3)] == [4, 5, 3]
    other.reset(prompt, seed=3)
    said = Said(ids=(1,), finish="stop", turn=0)
    assert [one.step(said).ids, one.step(said).ids, other.step(said).ids] == [(1,), (2,), (1,)]
    assert one.step(said).extra["pid"] != os.getpid()
    assert one.cut_off() == {"turns": 3.0}
    with pytest.raises(KeyError, match="nothing") as caught:
        one.step(replace(said, ids=(0,)))
    assert any("role environment" in note for note in caught.value.__notes__)
    one.close()
    os.kill(groups[1]["environment"].call("ping")[0], signal.SIGKILL)
    with pytest.raises(RoleLost) as caught:
        other.step(said)
    assert caught.value.role == "environment"
    other.close()
    environments.restart()
    again = environments()
    again.reset(prompt, seed=3)
    assert again.step(said).ids == (1,)
