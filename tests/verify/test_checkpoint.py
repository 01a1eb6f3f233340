"""Verification of a checkpoint folder: Hugging Face's own files pass, damaged ones end in the right code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bestiary.bridges import get_bridge
from bestiary.verify.checkpoint import BEYOND_WINDOW, choose_tokens, run_checkpoint
from bestiary.verify.cli import main
from bestiary.verify.reference import Reference, quiet
from bestiary.verify.run import BadUsage
from bestiary.verify.tiny import tiny_config
from bestiary.verify.verdict import Exit
from tests.verify.families import FAMILIES, REFERENCES


def _saved(tmp_path, family: str, case: str = "base", shards: int = 3):
    raw = tiny_config(REFERENCES[family], case)
    reference = Reference(REFERENCES[family], raw, 0, dtype=torch.float32)
    model = reference.model.to(torch.bfloat16)
    size = sum(parameter.numel() * 2 for parameter in model.parameters()) // shards + 1
    with quiet():
        model.save_pretrained(tmp_path / "checkpoint", max_shard_size=size)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_bfloat16_checkpoint_passes(family, tmp_path):
    verdict = run_checkpoint(_saved(tmp_path, family))
    assert verdict.exit_code == Exit.PASS, [item for level in verdict.levels for item in level.findings]
    assert [level.id for level in verdict.levels] == ["V0", "V1", "V8"]
    assert all(level.passed == level.planned for level in verdict.levels)
    assert verdict.levels[2].worst is not None


def test_given_tokens_are_used(tmp_path):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    verdict = run_checkpoint(folder, token_ids=[5, 6, 7] * 20)
    assert verdict.exit_code == Exit.PASS


def test_text_shorter_than_the_window_is_inconclusive(tmp_path):
    verdict = run_checkpoint(_saved(tmp_path, "gemma3_text"), token_ids=[3, 4, 5])
    assert verdict.exit_code == Exit.INCONCLUSIVE
    assert "do not pass the window of 16" in verdict.levels[2].findings[0].detail


def test_a_key_too_many_ends_in_2_by_name_and_the_rest_is_not_run(tmp_path):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.frobnicate"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    verdict = run_checkpoint(folder)
    assert verdict.exit_code == Exit.KEYS
    assert verdict.keys.unexpected == ["model.layers.0.self_attn.frobnicate"]
    assert [level.status for level in verdict.levels] == ["fail", "not run", "not run"]


def test_a_config_that_only_ours_misreads_ends_in_1(tmp_path, monkeypatch):
    from dataclasses import replace

    bridge = get_bridge("qwen3")

    def misread(hf):
        config = bridge.config_from_hf(hf)
        return replace(config, rope=replace(config.rope, theta=2 * config.rope.theta))

    monkeypatch.setattr(
        "bestiary.verify.checkpoint.get_bridge", lambda *a, **k: replace(bridge, config_from_hf=misread)
    )
    verdict = run_checkpoint(_saved(tmp_path, "qwen3"), keep_going=True)
    assert verdict.levels[2].status == "fail"
    assert verdict.levels[2].worst is not None


@pytest.mark.parametrize("ids", [[], [10**6], [-1]])
def test_tokens_outside_the_vocabulary_are_wrong_usage(tmp_path, ids):
    with pytest.raises(BadUsage):
        run_checkpoint(_saved(tmp_path, "qwen3", "square", shards=1), token_ids=ids)


def test_random_tokens_pass_the_window_and_long_texts_are_cut():
    raw = tiny_config(REFERENCES["gemma3_text"], "base")
    config = get_bridge("gemma3_text").parse(raw).decoder
    assert len(choose_tokens(raw, config, None, 0)) == 16 + BEYOND_WINDOW
    large = config.with_(vocab_size=262144)
    assert len(choose_tokens(raw, large, [1] * 5000, 0)) == 1024


def test_the_command_takes_a_folder_and_a_token_file(tmp_path, capsys):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    (tmp_path / "ids.json").write_text(json.dumps([1, 2, 3] * 10))
    assert main([str(folder), "--tokens", str(tmp_path / "ids.json"), "--quiet"]) == 0
    assert "V8 checkpoint" in capsys.readouterr().out
    (tmp_path / "ids.json").write_text('{"a": 1}')
    assert main([str(folder), "--tokens", str(tmp_path / "ids.json"), "--quiet"]) == 7
