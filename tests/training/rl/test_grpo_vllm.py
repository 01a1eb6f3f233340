"""Rounds of `bestiary grpo` on vLLM: parity after every sync, and whatever is wrong in a round ends the run by name."""

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch

from bestiary.tools.demo_rl_sorting import Sorting
from bestiary.training.processes import processes
from bestiary.training.rl import grpo, policy, vllm_engine
from bestiary.training.rl.config import GrpoConfig
from bestiary.training.rl.rollout_check import Retokenised, StaleWeights, WrongTemperature
from bestiary.training.rl.vllm_engine import VllmEngine
from bestiary.training.rl.weight_sync import SyncFailed, sync

from ...machine import NEEDS_VLLM

pytestmark = [pytest.mark.slow, NEEDS_VLLM]
ROUNDS, FULL = 3, 1e-4
QUERY = "model.layers.1.self_attn.q_proj.weight"
TASK = Sorting(
    demonstrations=2,
    prompts=40,
    held_out=2,
    hidden=64,
    layers=2,
    answers=4,
    round_prompts=4,
    rounds=ROUNDS,
    engine="vllm",
)
REWARD = """
def low(answers):
    return [sum(word < 7 for word in one.ids) / len(one.ids) for one in answers]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small random model, prompts, and a reward that tells its answers apart."""
    folder = tmp_path_factory.mktemp("sorting")
    TASK.write(folder, 0)
    (folder / "lowness.py").write_text(REWARD)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def started():
    """vLLM as the first run starts it, kept for all, with the process group that runs would make and take away."""
    kept = []
    with processes(60.0):
        yield kept
        for _, close in kept:
            close()


@pytest.fixture
def run(data, started, tmp_path, monkeypatch):
    """Three rounds with adapters; rows of metrics.jsonl, those before an error as well."""

    def engine(folder, **options):
        if not started:
            made = VllmEngine(folder, **options)
            started.append((made, made.close))
            made.close = lambda: None  # each run would
        return started[0][0]

    monkeypatch.setattr(vllm_engine, "VllmEngine", engine)
    content = TASK.learning(data / "random", data, 0)
    content["rollouts"] |= {"temperature": 0.9, "rows": 16}
    del content["loop"]["evaluation"]
    content["rewards"] = {"functions": [{"name": "low", "function": "lowness:low"}]}
    content |= {"lora": {"r": 4}, "optim": {"lr": 1e-2, "warmup": 0}, "out": str(tmp_path)}
    content["checkpoint"] = {"every": None, "export": False}

    def go(error=None, match=None):
        config = GrpoConfig.model_validate(content)
        if error is None:
            grpo.run(config)
        else:
            with pytest.raises(error, match=match):
                grpo.run(config)
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    return go


@pytest.fixture
def planted(monkeypatch):
    """Changes the stream of tensors in syncs; the change is told the version and all tensors of earlier syncs."""

    def plant(change):
        sent = []

        def changed(decoder, engine, version, **options):
            tensors = {name: value.clone() for name, value in decoder.named_hf_tensors()}
            sent.append(tensors)
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "named_hf_tensors", lambda: change(version, tensors, sent[0]))
                return sync(decoder, engine, version, **options)

        monkeypatch.setattr(policy, "sync", changed)
        return sent

    return plant


def test_log_probabilities_of_engine_and_policy_agree_after_every_sync(run):
    """In float32; the policy moves in every round, and the engine with it."""
    rows = run()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rl/sync_mismatch"] <= FULL
        assert row["rl/mismatch_mean"] <= FULL
        assert row["rl/staleness_max"] == 0
        assert row["grad_norm"] > 0


def test_a_stale_weight_ends_the_run_after_the_sync_that_left_it(run, planted):
    def stale(version, tensors, first):
        return iter((tensors | {QUERY: first[QUERY]} if version == 2 else tensors).items())

    sent = planted(stale)
    assert len(run(StaleWeights, "differ by .* worst is token|kept its earlier weights")) == 1
    assert not torch.equal(sent[0][QUERY], sent[2][QUERY])


@pytest.mark.parametrize("times", [1, 2])
def test_a_dropped_tensor_is_sent_again_once_and_then_ends_the_run(run, planted, times):
    left = [times]

    def dropped(version, tensors, _first):
        if version == 2 and left[0]:
            left[0] -= 1
            return iter({name: value for name, value in tensors.items() if name != QUERY}.items())
        return iter(tensors.items())

    planted(dropped)
    rows = run() if times == 1 else run(SyncFailed, f"tensor {QUERY} was dropped")
    assert len(rows) == (ROUNDS if times == 1 else 1)


def test_another_temperature_ends_the_run_before_anything_is_trained(run, monkeypatch):
    """Of the answers alone: what a sync asks is sampled as it should be."""
    wanted = vllm_engine._wanted

    def hotter(sampling, seed):
        found = wanted(sampling, seed)
        return found | ({"temperature": 0.5} if sampling.max_tokens == TASK.max_tokens else {})

    monkeypatch.setattr(vllm_engine, "_wanted", hotter)
    assert run(WrongTemperature, r"sampled at temperature 0\.5 and are trained at 0\.9") == []


def test_ids_that_were_changed_on_the_way_end_the_run_before_they_are_trained(run, monkeypatch):
    """One token of one answer in the second round, as decoding and encoding makes it."""
    calls, generate = itertools.count(1), VllmEngine.generate

    def changed(engine, prompts, sampling, *, keys=None):
        said = generate(engine, prompts, sampling, keys=keys)
        if next(calls) == 2:
            ids = said[3].ids.copy()
            ids[1] = 2 + (ids[1] + 3) % 10
            said[3] = replace(said[3], ids=ids)
        return said

    monkeypatch.setattr(VllmEngine, "generate", changed)
    assert len(run(Retokenised, "agrees with what was sampled up to token 1, not from there")) == 1
