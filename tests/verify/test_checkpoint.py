"""Verification of a checkpoint folder: Hugging Face's own files pass, damaged ones end in the right code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from bestiary.bridges import get_bridge, loading
from bestiary.bridges.errors import OfflineError
from bestiary.verify import checkpoint_bench, verify
from bestiary.verify.checkpoint import BEYOND_WINDOW, choose_tokens, run_checkpoint
from bestiary.verify.cli import main
from bestiary.verify.reference import Reference, quiet
from bestiary.verify.report import MAX_LINES, family_lines
from bestiary.verify.run import BadUsage
from bestiary.verify.tiny import tiny_config
from bestiary.verify.verdict import Exit
from tests.verify.families import FAMILIES, REFERENCES


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


def test_the_verdict_of_a_hub_id_holds_the_commit_that_was_read(tmp_path, monkeypatch):
    """A branch moves; what was verified is a commit, and the command that repeats the run names it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--somebody--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    _saved(tmp_path, "qwen3", "square", shards=1).rename(cached / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    result = verify("somebody/model", level="V0")
    assert (result.exit_code, result.revision) == (Exit.PASS, commit)
    assert f"--revision {commit}" in str(result.repro)
    with pytest.raises(OfflineError, match="somebody/model@v2"):
        verify("somebody/model", level="V0", revision="v2")
    with pytest.raises(BadUsage, match="--revision v2 with the family qwen3"):
        verify("qwen3", revision="v2")


def test_given_tokens_are_used(tmp_path):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    verdict = run_checkpoint(folder, token_ids=[5, 6, 7] * 20)
    assert verdict.exit_code == Exit.PASS


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_level_that_a_checkpoint_does_not_have_is_wrong_usage(tmp_path):
    with pytest.raises(BadUsage, match="V5"):
        run_checkpoint(_saved(tmp_path, "qwen3", "square", shards=1), levels=("V0", "V5"))


@pytest.mark.parametrize("ids", [[], [10**6], [-1]])
def test_tokens_outside_the_vocabulary_are_wrong_usage(tmp_path, ids):
    with pytest.raises(BadUsage):
        run_checkpoint(_saved(tmp_path, "qwen3", "square", shards=1), token_ids=ids)


def test_random_tokens_pass_the_window_and_long_texts_are_cut():
    raw = tiny_config(REFERENCES["gemma3_text"], "base")
    config = get_bridge("gemma3_text").parse(raw).decoder
    assert len(choose_tokens(config, None, 0)) == 16 + BEYOND_WINDOW
    large = config.with_(vocab_size=262144)
    assert len(choose_tokens(large, [1] * 5000, 0)) == 1024


def test_the_command_takes_a_folder_and_a_token_file(tmp_path, capsys):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    (tmp_path / "ids.json").write_text(json.dumps([1, 2, 3] * 10))
    assert main([str(folder), "--tokens", str(tmp_path / "ids.json"), "--quiet"]) == 0
    assert "V8 checkpoint" in capsys.readouterr().out
    (tmp_path / "ids.json").write_text('{"a": 1}')
    assert main([str(folder), "--tokens", str(tmp_path / "ids.json"), "--quiet"]) == 7


def _changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_missing_extra_and_mismatched_keys_are_one_failure_with_the_whole_text(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.frobnicate"] = torch.zeros(2)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 5)

    verdict = run_checkpoint(_changed(_saved(tmp_path, "qwen3", "square", shards=1), change))
    assert verdict.exit_code == Exit.KEYS
    level = verdict.levels[0]
    assert (level.planned, level.failed) == (1, 1)
    assert level.findings[0].check == "import plan"
    shown = "\n".join(family_lines(verdict))
    assert len(shown.splitlines()) <= MAX_LINES
    for text in (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.frobnicate",
        "model.layers.2.mlp.up_proj.weight",
        "[3, 5]",
        "[80, 80]",
        "remedy",
        "extend the rules of the bridge",
    ):
        assert text in level.findings[0].detail
        assert text in shown


def test_a_stored_head_that_differs_from_its_embedding_is_one_failure_of_v1(tmp_path):
    folder = _saved(tmp_path, "qwen3", "mha", shards=1)  # tied
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _changed(folder, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    verdict = run_checkpoint(folder)
    assert verdict.exit_code == Exit.KEYS
    assert [level.status for level in verdict.levels] == ["ok", "fail", "not run"]
    (finding,) = verdict.levels[1].findings
    assert finding.check == "import"
    assert "lm_head.weight" in finding.detail
    assert "remedy" in finding.detail
    assert all(line.strip() in "\n".join(family_lines(verdict)) for line in finding.detail.splitlines())


def test_v1_loads_no_whole_model_of_either_side(tmp_path, monkeypatch):
    folder = _saved(tmp_path, "qwen3_moe", shards=2)

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a whole model")

    monkeypatch.setattr(loading, "load_checkpoint", load)
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", _a_part_only(PreTrainedModel))
    (level,) = run_checkpoint(folder, levels=("V1",)).levels
    assert level.status == "ok", level.findings


def _a_part_only(cls):
    """Hugging Face's loader, given the tensors of one layer at most."""
    load = cls._load_pretrained_model

    def checked(model, state, files, *rest):
        layers = {name.split(".layers.")[1].split(".")[0] if ".layers." in name else "" for name in state}
        assert len(layers) == 1, layers
        assert files is None
        return load(model, state, files, *rest)

    return staticmethod(checked)


def test_what_transformers_does_not_expect_in_our_export_is_a_failure_of_v1(tmp_path, monkeypatch):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    written = checkpoint_bench.export_checkpoint

    def with_one_more(bridge, src, path, **options):
        target = written(bridge, src, path, **options)
        tensors = load_file(target / "model.safetensors") | {"model.layers.1.self_attn.frobnicate": torch.zeros(2)}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    monkeypatch.setattr(checkpoint_bench, "export_checkpoint", with_one_more)
    verdict = run_checkpoint(folder, levels=("V1",))
    details = {finding.check: finding.detail for finding in verdict.levels[0].findings}
    assert "model.layers.1.self_attn.frobnicate" in details["transformers loads"]


def test_weights_that_are_not_finite_are_named_and_counted(tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][2, 3:5] = torch.nan
        tensors["model.layers.1.mlp.up_proj.weight"][7, 0] = torch.inf

    verdict = run_checkpoint(_changed(_saved(tmp_path, "qwen3", "square", shards=1), change))
    assert verdict.exit_code == Exit.NUMERIC
    (finding,) = verdict.levels[0].findings
    assert finding.check == "finite weights"
    assert "model.layers.1.mlp.up_proj.weight (3 NaN or infinite values)" in finding.detail
    assert "model.layers.1.mlp.up_proj.weight (3 NaN" in "\n".join(family_lines(verdict))


def test_weights_are_scanned_in_blocks(tmp_path, monkeypatch):
    folder = _saved(tmp_path, "qwen3", "square", shards=1)
    _changed(folder, lambda tensors: tensors["model.embed_tokens.weight"][79].fill_(torch.nan))
    monkeypatch.setattr("bestiary.verify.checkpoint.SCANNED_BYTES", 7 * 4 * 80)
    (finding,) = run_checkpoint(folder).levels[0].findings
    assert "model.embed_tokens.weight (80 NaN" in finding.detail
