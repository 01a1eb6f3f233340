"""A real vLLM engine in TRL's hands: it follows a MoE policy with our adapters, and is never served the wrong names."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bestiary.models import Qwen3MoE

from ...machine import NEEDS_VLLM
from ...models.tiny import tiny_config
from .tiny_checkpoint import tokenizer

pytestmark = [pytest.mark.slow, NEEDS_VLLM]
SCRIPT = Path(__file__).with_name("vllm_sync.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One engine start; heads and experts of a width that vLLM has kernels for."""
    place = tmp_path_factory.mktemp("vllm")
    config = tiny_config("qwen3_moe")
    config = config.with_(
        num_hidden_layers=2, layer_types=config.layer_types[:2], hidden_size=64, intermediate_size=64, dense_layers=()
    )
    config = config.with_(
        attention=replace(config.attention, head_dim=32, scale=32**-0.5),
        rope=replace(config.rope, rotary_dim=32),
        moe=replace(config.moe, num_experts=4, intermediate_size=64),
    )
    model = Qwen3MoE(config, dtype=torch.float32)
    model.init_weights(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)  # so that a wrong expert shows
    model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id = 0, 1, None
    model.save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    command = [sys.executable, str(SCRIPT), str(place / "model"), str(place / "found.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"PYTHONSAFEPATH": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((place / "found.json").read_text())


def test_vllm_follows_the_policy(found):
    """Experts and adapters: log-probabilities of what it samples are the policy's, sync after sync."""
    assert found["start"] < 1e-4
    assert found["stale"] > 0.05, "the step moved nothing, and the rest of this test would show nothing"
    assert found["first sync"] < 1e-4
    assert found["second sync"] < 1e-4


def test_trls_own_walk_never_serves_the_old_weights(found):
    """With adapters it raises, by TRL's call and by vLLM's reload; stacked experts alone are refused or read right."""
    assert found["sync of TRL"] is not None
    assert found["adapters by TRL's walk"] is not None
    assert found["experts by TRL's walk"] is not None or found["experts apart"] < 1e-4
