"""vLLM in a process of its own on Ray: synced from here, killed while it samples, started again."""

import os
import signal
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from bestiary.models import AutoDecoder, Qwen3
from bestiary.training.errors import RoleLost
from bestiary.training.rl.groups import Group, Pool
from bestiary.training.rl.remote_engine import RolloutGroup
from bestiary.training.rl.rollout_check import check_rollouts
from bestiary.training.rl.vllm_engine import VllmEngine
from bestiary.training.rl.weight_sync import sync
from bestiary.training.rl.workers import RolloutWorker
from bestiary.verify.weights import perturb

from ...machine import NEEDS_VLLM
from ..ray_session import session as session  # the fixture
from .test_vllm_engine import PROMPTS, SAMPLING, small


@NEEDS_VLLM
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_that_dies_in_the_middle_of_its_answers_is_replaced_and_says_what_the_policy_says(session, tmp_path):
    start = Qwen3(small(tied=False), dtype=torch.float32)
    perturb(start, seed=0)
    folder = start.save_pretrained(tmp_path / "start")
    policy = AutoDecoder.from_pretrained(folder, dtype=torch.float32)
    perturb(policy, seed=1)
    pool = Pool(1, roles=1)
    make = partial(VllmEngine, folder, rows=8, cache_bytes=1 << 24)
    group = Group("rollout", RolloutWorker, make, size=1, pool=pool, threads=4, timeout_s=240)
    try:
        engine = RolloutGroup(group, bucket_bytes=20_000)
        found = sync(policy, engine, 1)
        assert "model.embed_tokens.weight" in found.read
        said = engine.generate(PROMPTS, SAMPLING, keys=list("abc"))
        assert {one.version for one in said} == {1}
        check_rollouts(policy, PROMPTS, said, SAMPLING, version=1)

        threading.Timer(0.5, os.kill, (group.pids[0], signal.SIGKILL)).start()
        long = replace(SAMPLING, max_tokens=40, stop_ids=(), n=200)
        with pytest.raises(RoleLost) as caught:
            engine.generate(PROMPTS, long)
        assert caught.value.role == "rollout"
        engine.restart()
        assert sync(policy, engine, 2).version == 2
        again = engine.generate(PROMPTS, SAMPLING, keys=list("abc"))
        assert all(np.array_equal(one.ids, other.ids) for one, other in zip(said, again, strict=True))
    finally:
        group.close()
        pool.close()
