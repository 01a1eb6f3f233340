"""Whole runs: the families pass, and each kind of defect ends in its own exit code."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from bestiary.bridges import Bridge
from bestiary.bridges.errors import UnsupportedConfig, UnsupportedModelType
from bestiary.kernels import norm
from bestiary.models import Decoder, DecoderConfig
from bestiary.models.config import Activation
from bestiary.verify import levels
from bestiary.verify.gates import Gates
from bestiary.verify.run import BadUsage, parse_levels, run
from bestiary.verify.side import OurSide, TheirSide
from bestiary.verify.verdict import Exit, Verdict
from tests.verify.families import POOL


def _level(verdict: Verdict, name: str):
    return next(level for level in verdict.levels if level.id == name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), [("qwen3", 123), ("gemma3_text", 0), ("qwen3_moe", 0), ("gpt_oss", 123)])
def test_a_family_passes_every_level_but_the_config_sweep(family, seed):
    """Two of them under another seed than everywhere else.

    The sweep, the longest level, runs on one family below and on all in `make verify-all`.
    """
    verdict = run(family, "V0..V2,V4..V7", seed, pool=POOL)
    assert verdict.exit_code == Exit.PASS, [item for level in verdict.levels for item in level.findings]
    assert all(level.passed == level.planned > 0 for level in verdict.levels)
    worst = [_level(verdict, name).worst for name in ("V2", "V4", "V5")]
    assert all(item is not None and item.figure is not None and item.figure < 1e-12 for item in worst)
    assert verdict.weak == []
    assert verdict.keys.missing == verdict.keys.unexpected == []


@pytest.mark.slow
def test_the_config_sweep_passes_and_lists_what_is_refused():
    verdict = run("qwen3", "V3", pool=POOL)
    assert verdict.exit_code == Exit.PASS
    level = _level(verdict, "V3")
    assert level.passed + level.refused == level.planned
    refused = {
        item.field for item in verdict.config if item.ours == "refused" and item.kind in ("live", "shape", "train")
    }
    assert level.refused == sum(item.status == "refused" for item in level.findings) >= len(refused)
    assert any(item.ours == "refused" for item in verdict.config)  # values that no run of transformers feels
    assert all(item.ours in ("equal", "refused") for item in verdict.config)
    assert sum(item.kind == "live" for item in verdict.config) > 30


@pytest.mark.slow
def test_a_numeric_bug_ends_in_1_with_place_command_and_later_levels_not_run():
    def other_activation(model: Decoder) -> None:
        model.get_submodule("model.layers.1.mlp").activation = Activation.GELU  # type: ignore[assignment]

    verdict = run("qwen3", pool=POOL, mutate_ours=lambda side: side.model(other_activation))
    assert (verdict.exit_code, verdict.verdict) == (Exit.NUMERIC, "numeric")
    assert [level.status for level in verdict.levels] == ["ok", "ok", "fail"] + ["not run"] * 6
    assert all(level.skipped == level.planned > 0 for level in verdict.levels[3:])
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.module == "model.layers.1.mlp"
    assert verdict.first_divergence.tensor == "input of down_proj"
    assert verdict.repro == "verify-bridge qwen3 --level V2 --only layer1 --seed 0"


@pytest.mark.slow
def test_keep_going_runs_every_level():
    def wrong(model: Decoder) -> None:
        with torch.no_grad():
            model.get_parameter("model.norm.weight").mul_(2)

    verdict = run("qwen3", "V2,V4..V6", pool=POOL, keep_going=True, mutate_ours=lambda side: side.model(wrong))
    assert [level.status for level in verdict.levels] == ["fail"] * 4


def _without_norms(bridge: Bridge) -> Bridge:
    return replace(
        bridge, rules=tuple(r for r in bridge.rules if "q_norm" not in str(r) and "{q,k}_norm" not in str(r))
    )


def test_a_missing_rule_ends_in_2_and_names_the_keys():
    verdict = run("qwen3", pool=POOL, mutate_ours=lambda side: side.bridge(_without_norms))
    assert verdict.exit_code == Exit.KEYS
    assert "model.layers.0.self_attn.q_norm.weight" in verdict.keys.unexpected
    level = verdict.levels[0]
    assert (level.planned, level.failed) == (len(verdict.cases), len(verdict.cases))
    assert [finding.check for finding in level.findings] == [f"{case}/import plan" for case in verdict.cases]
    assert all("q_norm.weight" in item.detail and "remedy" in item.detail for item in level.findings)


def test_only_a_layer_still_shows_why_nothing_can_be_imported():
    verdict = run("qwen3", "V0", only=["layer0"], pool=POOL, mutate_ours=lambda side: side.bridge(_without_norms))
    assert verdict.exit_code == Exit.KEYS
    assert {finding.check.partition("/")[2] for finding in verdict.levels[0].findings} == {"import plan"}


@pytest.mark.slow
def test_a_field_that_is_ignored_ends_in_3_and_is_named():
    def fixed(config: DecoderConfig) -> DecoderConfig:
        return replace(config, norm=replace(config.norm, eps=1e-6))

    verdict = run("qwen3", "V3", pool=POOL, mutate_ours=lambda side: side.config(fixed))
    assert verdict.exit_code == Exit.CONFIG
    ignored = {(item.field, item.value) for item in verdict.config if item.ours == "ignored"}
    assert ignored == {("rms_norm_eps", 1e-4), ("rms_norm_eps", 1e-5)}


def test_a_bridge_that_refuses_the_family_ends_in_4():
    def refuse(config: DecoderConfig) -> DecoderConfig:
        raise UnsupportedConfig("hidden_size", config.hidden_size, "is odd.", read_from="a test", remedy="none")

    verdict = run("qwen3", "V0..V2", pool=POOL, mutate_ours=lambda side: side.config(refuse), keep_going=True)
    assert verdict.exit_code == Exit.REFUSED
    assert verdict.error is not None
    assert "hidden_size" in verdict.error


@pytest.mark.slow
def test_a_reference_with_a_dead_parameter_ends_in_5():
    def silence(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("model.layers.1.self_attn.o_proj.weight").zero_()

    verdict = run("qwen3", "V2", mutate_reference=lambda side: side.model(silence))
    assert _level(verdict, "V2").status == "ok", "ours has the same weights, so nothing differs"
    assert verdict.exit_code == Exit.INCONCLUSIVE
    assert "base: model.layers.1.self_attn.v_proj.weight moves no logit" in verdict.weak


def test_a_reference_patched_in_memory_ends_in_6(monkeypatch):
    original = modeling_qwen3.rotate_half
    monkeypatch.setattr(modeling_qwen3, "rotate_half", lambda x: original(x))
    verdict = run("qwen3", "V2", pool=POOL, only=["base"])
    assert verdict.exit_code == Exit.TAMPERING
    assert verdict.error is not None
    assert "rotate_half was replaced in memory" in verdict.error


def test_a_borrowed_module_ends_in_6():
    def borrow(model: Decoder) -> None:
        borrowed = modeling_qwen3.Qwen3RMSNorm(model.decoder_config.hidden_size, model.decoder_config.norm.eps)
        borrowed.weight = model.model.norm.weight
        model.model.norm = borrowed  # type: ignore[assignment]

    verdict = run("qwen3", "V2", pool=POOL, mutate_ours=lambda side: side.model(borrow))
    assert verdict.exit_code == Exit.TAMPERING


@pytest.mark.slow
def test_a_mutated_reference_is_compared_with_ours_unchanged():
    def other(side: TheirSide) -> None:
        side.raw(lambda raw: {**raw, "rms_norm_eps": 0.5})

    verdict = run("qwen3", "V2", mutate_reference=other)
    assert verdict.exit_code == Exit.NUMERIC


def test_a_patch_lasts_as_long_as_the_run():
    before = norm.rms_norm
    module = norm

    def plant(side: OurSide) -> None:
        from bestiary.models.layers import norm as layer

        side.patch(layer, "rms_norm", lambda x, weight, eps, **style: before(x, weight, 2 * eps, **style))

    from bestiary.models.layers import norm as layer

    assert run("qwen3", "V2", pool=POOL, mutate_ours=plant).exit_code == Exit.NUMERIC
    assert layer.rms_norm is before is module.rms_norm


@pytest.mark.slow
def test_tightened_gates_are_applied_and_marked():
    verdict = run("qwen3", "V2", pool=POOL, gates=Gates().tightened(["V2=1e-18"]))
    assert not verdict.official
    assert verdict.exit_code == Exit.NUMERIC
    assert run("qwen3", "V2", pool=POOL).official


def test_only_restricts_a_run_and_marks_it_partial():
    verdict = run("qwen3", "V0..V2", only=["layer0"], pool=POOL)
    assert verdict.scope == "partial"
    assert [level.id for level in verdict.levels] == ["V0", "V1", "V2"]
    assert 0 < sum(level.planned for level in verdict.levels) < 200


@pytest.mark.slow
def test_our_forward_also_agrees_from_a_process_without_transformers_models():
    verdict = run("gpt_oss", "V2", only=["isolated"], isolate=True, pool=POOL)
    assert verdict.exit_code == Exit.PASS
    assert verdict.levels[0].planned == 4


@pytest.mark.parametrize("levels", ["V9", "V2..V0", "V2..", "", "V0,,V1"])
def test_levels_that_do_not_exist_are_wrong_usage(levels):
    with pytest.raises(BadUsage):
        parse_levels(levels)


def test_a_pattern_that_matches_nothing_is_wrong_usage():
    with pytest.raises(BadUsage, match="matches no check"):
        run("qwen3", "V2", only=["layer99"], pool=POOL)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(UnsupportedModelType, match="qwen3"):
        run("frobnicator")


@pytest.mark.slow
def test_a_config_from_a_file_takes_the_place_of_the_tiny_ones():
    raw = {
        "model_type": "qwen3",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 60,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    verdict = run("qwen3", "V0..V2,V5", cases={"mine": raw})
    assert verdict.exit_code == Exit.PASS
    assert all(finding.startswith("mine") for finding in verdict.cases)


class _Enough(Exception):
    """Ends a run before its first level."""


def test_levels_are_imported_before_anything_is_planted(monkeypatch):
    """A module whose import fell into a run with a bug would keep what it imports by name, for every later run."""
    module, seen = "bestiary.verify.levels.k_kernels", []
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(levels, "k_kernels", raising=False)

    def plant(side):
        seen.append(module in sys.modules)
        raise _Enough

    with pytest.raises(_Enough):
        run("qwen3", "K", mutate_ours=plant, pool=POOL)
    assert seen == [True]
