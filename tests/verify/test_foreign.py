"""An implementation that is not ours is verified like ours, as far as it goes, and borrows nothing."""

import json

import pytest

from bestiary.verify import verify
from bestiary.verify.foreign import BadFactory, load_factory
from bestiary.verify.html_report import html_report
from bestiary.verify.model_card import card
from bestiary.verify.reference import ReferencePool
from bestiary.verify.report import family_lines
from bestiary.verify.run import BadUsage
from bestiary.verify.verdict import Exit, Implementation, report
from tests.verify.verdicts import verdict as made

HERE = "tests.verify.small_qwen3"
POOL = ReferencePool()
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("foreign") / "base.json"
    file.write_text(json.dumps(CONFIG))
    return file


def _verified(config, name, level, **options):
    return verify("qwen3", ours=f"{HERE}:{name}", config=config, level=level, pool=POOL, **options)


def _failures(verdict):
    return {finding.check for level in verdict.levels for finding in level.findings if finding.status == "failed"}


def test_an_independent_module_passes_every_level_that_applies(config):
    verdict = _verified(config, "Qwen3", "V0..V2,V4..V7,K", keep_going=True)
    assert verdict.exit_code == Exit.PASS, _failures(verdict) or verdict.error
    assert [level.id for level in verdict.levels] == ["V0", "V2", "V4", "V5", "V6", "V7"]
    assert verdict.scope == "partial"
    assert verdict.implementation.factory == f"{HERE}:Qwen3"
    assert len(verdict.implementation.source_hash) == 64
    omitted = "\n".join(verdict.implementation.omitted)
    assert "V1: judges bestiary's loader and export" in omitted
    assert "V5 base/cached, steps: needs past_key_values, use_cache" in omitted
    asked = next(level for level in verdict.levels if level.id == "V5")
    assert asked.planned >= 20, "padding, offsets and lengths are asked"


def test_config_fields_move_it_as_they_move_the_reference_or_it_refuses_them(config):
    verdict = _verified(config, "Qwen3", "V3", only=["rms_norm_eps*", "sliding_window*", "*rope_type*", "hidden_act*"])
    (level,) = verdict.levels
    assert level.status == "ok", _failures(verdict)
    answers = {found.field: found.ours for found in verdict.config}
    assert answers["rms_norm_eps"] == "equal"
    assert answers["rope_parameters.rope_type"] == "refused"


def test_a_module_without_rotary_embedding_fails_where_attention_starts(config):
    verdict = _verified(config, "Unturned", "V2")
    assert verdict.exit_code == Exit.NUMERIC
    assert verdict.first_divergence.module.startswith("model.layers.0.self_attn")
    assert f"--ours {HERE}:Unturned" in verdict.repro


def test_a_lost_gradient_fails_although_every_logit_is_right(config):
    verdict = _verified(config, "Detached", "V2,V4")
    assert verdict.exit_code == Exit.NUMERIC
    assert "base/model.norm.weight" in _failures(verdict)


def test_a_factory_that_delegates_to_transformers_is_tampering_at_any_level(config):
    verdict = _verified(config, "borrowed", "V0")
    assert verdict.exit_code == Exit.TAMPERING
    assert "transformers.models.qwen3.modeling_qwen3" in verdict.error


def test_parameters_under_other_names_fail_as_keys_and_are_named(config):
    verdict = _verified(config, "renamed", "V0")
    assert verdict.exit_code == Exit.KEYS
    assert "model.layers.0.mlp.wo.weight" in json.dumps(verdict.model_dump(mode="json"))


@pytest.mark.parametrize("name", ["tests.verify.nowhere:build", f"{HERE}:nothing", f"{HERE}:NOTHING", HERE])
def test_a_name_that_means_no_function_is_wrong_usage(name):
    with pytest.raises(BadFactory, match="--ours") as error:
        load_factory(name)
    assert error.value.exit_code == Exit.USAGE


def test_a_checkpoint_takes_no_implementation_of_somebody_elses(tmp_path):
    with pytest.raises(BadUsage, match="name the family"):
        verify(tmp_path, ours=f"{HERE}:Qwen3")


def test_page_card_and_text_say_whose_implementation_was_verified():
    other = Implementation(
        factory="mine.model:build", source_hash="", omitted=["V1: judges files", "K: judges kernels"]
    )
    result = report([made(scope="partial", implementation=other)])
    page = html_report(result)
    for text in (page, card(result), "\n".join(family_lines(result.verdicts[0]))):
        assert "mine.model:build" in text
    assert "2 levels and checks were not asked" in page
    assert "mine.model:build" not in html_report(report([made()]))
