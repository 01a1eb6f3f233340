"""The self-test: bugs die and are named, what is right passes, and a self-test that proves too little does not pass."""

import json
import re
import sys
import types
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch

from bestiary.bridges import get_bridge, registered_bridges
from bestiary.verify import planted, self_test
from bestiary.verify.benign import REWRITES, Benign
from bestiary.verify.cli import main
from bestiary.verify.hypotheses import MISFITS
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.planted import CATALOGUE, BadCatalogue, PlantedBug, catalogue_with
from bestiary.verify.planted.patching import adapted, patch
from bestiary.verify.reference import Reference, ReferencePool
from bestiary.verify.run import run
from bestiary.verify.self_test import FamilyResult, Kill, Pass, judge, plant, rewrite
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_configs
from bestiary.verify.verdict import Exit
from tests.verify.families import FAMILIES, POOL

BY_ID = {bug.id: bug for bug in CATALOGUE}
REGISTERED = sorted(registered_bridges())
NO_BUG = PlantedBug(id="Z1_nothing", cause="nothing is wrong", level="V2", ours=lambda side: None)

SAMPLE = {
    "qwen3": (
        "Q19_qk_norm_after_rope",
        "O40c_yarn_betas_swapped",
        "C13c_tie_lost_after_load",
        "B14a_layers_swapped_on_import",
        "C53_attention_bias_ignored",
        "C17b_cache_offset_ignored",
        "C17e_positions_skip_holes",
        "H48a_rope_table_in_bf16",
        "C59b_attention_dropout_in_eval",
        "C59c_attention_dropout_on_the_values",
        "X50b_reference_patched",
    ),
    "gemma3_text": (
        "G22a_window_plus_one",
        "G25a_scaling_on_local_layers",
        "G28e_norm_weight_folded_on_load",
        "T46g_soft_cap_missing_in_the_loss",
        "G30d_bidirectional_window_minus_one",
        "C07h_proportional_frequencies_squeezed",
        "C16c_pad_token_trained",
    ),
    "qwen3_moe": (
        "M31b_experts_sorted_as_text",
        "M33b_weights_always_normalised",
        "M48c_grouped_weights_unsorted",
        "T46d_router_loss_double_softmax",
        "X50a_transformers_computes",
    ),
    "gpt_oss": (
        "O37_gate_up_read_as_halves",
        "O38e_up_clamped_above_only",
        "O39a_sinks_ignored",
        "O53b_attention_bias_not_built",
        "T47d_sink_gradient_lost",
        "C16c_pad_token_trained",
        "C17e_positions_skip_holes",
    ),
}


@cache
def _configs(family):
    bridge = get_bridge(family)
    return bridge, [bridge.parse(raw).decoder for raw in tiny_configs(bridge.reference).values()]


def _concerned(family):
    bridge, configs = _configs(family)
    return {bug.id for bug in CATALOGUE if bug.concerns(bridge, configs)}


# ------------------------------------------------------------------ the catalogue


def test_ids_are_unique_numbered_and_every_record_says_what_it_needs():
    assert len(BY_ID) == len(CATALOGUE)
    assert len({bug.id.partition("_")[0] for bug in CATALOGUE}) == len(CATALOGUE)
    for bug in CATALOGUE:
        assert re.fullmatch(r"[A-Z]\d\d[a-z]?_[a-z0-9_]+", bug.id), bug.id
        assert bug.level in ("V0", "V1", "V2", "V3", "V4", "V5", "V6", "V7", "K"), bug.id
        assert bug.cause
        assert bug.checks or bug.reference is not None, f"{bug.id}: neither a check nor a replay can name it"


def test_causes_differ():
    assert len({bug.cause for bug in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.slow
def test_every_bug_concerns_a_family_and_every_family_has_at_least_34():
    concerned = {family: _concerned(family) for family in REGISTERED}
    assert set().union(*concerned.values()) == set(BY_ID)
    assert all(len(ids) >= self_test.MIN_BUGS for ids in concerned.values())


@pytest.mark.parametrize("family", REGISTERED)
def test_the_kill_list_names_exactly_what_concerns_the_family(family):
    kill_list = get_bridge(family).kill_list
    assert {id for id in BY_ID if any(fnmatchcase(id, glob) for glob in kill_list)} == _concerned(family)


def test_benign_rewrites_have_unique_ids_and_each_family_meets_at_least_ten():
    assert len({benign.id for benign in REWRITES}) == len(REWRITES)
    for family in FAMILIES:
        _, configs = _configs(family)
        assert sum(any(benign.applies(config) for config in configs) for benign in REWRITES) >= self_test.MIN_BENIGN


# ------------------------------------------------------------------ plants are undone


def _probe(family):
    bridge = get_bridge(family)
    raw = tiny_configs(bridge.reference, ["base"])["base"]
    return bridge, raw, Inputs(tokens(raw["vocab_size"], 2, 40, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_plants_in_the_reference_leave_no_trace(family):
    bridge, raw, inputs = _probe(family)
    reference = Reference(bridge.reference, raw, 5)
    before, fitting = reference.call(inputs, use_cache=False)["logits"], 0
    for bug in CATALOGUE:
        with suppress(*MISFITS):
            if bug.reference is not None:
                with bug.reference(reference.model) as changed:
                    assert next(changed.parameters()).dtype is torch.float64
                    fitting += 1
    assert fitting >= 30
    assert torch.equal(reference.call(inputs, use_cache=False)["logits"], before)
    assert torch.equal(Reference(bridge.reference, raw, 5).call(inputs, use_cache=False)["logits"], before)


@pytest.mark.parametrize("family", FAMILIES)
def test_plants_on_our_side_leave_no_trace(family):
    bridge, raw, inputs = _probe(family)
    state = Reference(bridge.reference, raw, 5).state()

    def logits():
        with torch.no_grad():
            return OurSide(bridge).build(raw, state, torch.float64)(**inputs.kwargs())["logits"]

    before, rules = logits(), bridge.rules
    for id in sorted(_concerned(family)):
        side = OurSide(bridge)
        BY_ID[id].ours(side)
        assert side.mutated, id
        with side.patched():
            pass
    assert torch.equal(logits(), before)
    assert bridge.rules is rules


# ------------------------------------------------------------------ kills


@pytest.mark.parametrize(("family", "id"), [(family, id) for family, ids in SAMPLE.items() for id in ids])
def test_a_planted_bug_is_killed_by_its_level_and_named(family, id):
    kill = plant(family, BY_ID[id], pool=POOL)
    assert kill.killed, kill
    assert kill.named, kill


def test_a_cheat_that_makes_both_sides_agree_is_found_by_its_guard_alone():
    """With a fresh reference the logits agree, wrong on both sides."""
    kill = plant("qwen3", BY_ID["X50b_reference_patched"])
    assert kill.verdict == "tampering"
    assert kill.check == "tampering"
    assert "repeat_kv was replaced in memory" in kill.detail
    assert kill.named


def test_a_cheat_that_reaches_the_reference_leaves_no_answer_of_it_to_other_runs():
    pool = ReferencePool()
    assert plant("qwen3", BY_ID["X50b_reference_patched"], pool=pool).killed
    assert run("qwen3", "V2", only=["base/second seed", "base/logits"], pool=pool).levels[0].status == "ok"


def test_a_bug_whose_effect_shows_on_one_config_only_is_planted_there():
    kill = plant("qwen3", BY_ID["C08a_eps_hard_coded"], pool=POOL)
    assert kill.check.startswith("mha/")
    assert kill.causes == ["C08a_eps_hard_coded"]


@pytest.mark.slow
def test_the_same_bug_under_another_seed_is_killed_and_named():
    kill = plant("gpt_oss", BY_ID["O40b_yarn_attention_factor_missing"], seed=91)
    assert kill.killed
    assert kill.causes == ["O40b_yarn_attention_factor_missing"]


def test_a_bug_that_is_none_survives_and_the_self_test_fails():
    kill = plant("qwen3", NO_BUG, pool=POOL)
    assert not kill.killed
    assert kill.verdict == "pass"
    result = judge([_family(kills=[*_many_kills(), kill])], seed=0, seconds=1.0)
    assert result.exit_code == Exit.NUMERIC
    assert result.problems == ["qwen3: Z1_nothing survives V2 (pass): nothing is wrong"]
    assert "killed 40/41" in result.text()


def test_a_plant_that_crashes_or_finds_no_place_is_no_kill():
    def crash(_function):
        def crashed(*args, **kwargs):
            raise TypeError("the plant is broken")

        return crashed

    crashing = replace(NO_BUG, ours=patch("bestiary.models.layers.norm:rms_norm", crash))
    kill = plant("qwen3", crashing, pool=POOL)
    assert not kill.killed
    nowhere = replace(NO_BUG, ours=patch("bestiary.models.layers.norm:no_such_function", lambda f: f))
    kill = plant("qwen3", nowhere, pool=POOL)
    assert not kill.killed
    assert "cannot be planted" in kill.verdict


def test_a_refusal_is_no_kill():
    def refuse(hf):
        raise hf.unsupported("hidden_size", "is refused.", remedy="none")

    refusing = replace(NO_BUG, ours=lambda side: side.bridge(lambda bridge: replace(bridge, config_from_hf=refuse)))
    kill = plant("qwen3", refusing, pool=POOL)
    assert kill.verdict == "refused"
    assert not kill.killed


# ------------------------------------------------------------------ benign rewrites


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "id"),
    [
        ("qwen3", "fused_qkv"),
        ("qwen3", "blocked_attention"),
        ("gemma3_text", "torch_rms_norm"),
        ("qwen3_moe", "every_expert"),
        ("gpt_oss", "sink_as_key"),
    ],
)
def test_a_benign_rewrite_passes(family, id):
    benign = next(item for item in REWRITES if item.id == id)
    result = rewrite(family, benign, pool=POOL)
    assert result.passed, result


def test_a_rewrite_that_is_wrong_is_a_false_alarm_and_fails_the_self_test():
    wrong = Benign(
        id="almost_a_norm",
        what="a norm with another eps",
        ours=adapted(lambda config: config.with_(norm=replace(config.norm, eps=config.norm.eps * 1.01))),
        levels="V2",
    )
    result = rewrite("qwen3", wrong, pool=POOL)
    assert not result.passed
    judged = judge([_family(passes=[*_many_passes(), result])], seed=0, seconds=1.0)
    assert judged.exit_code == Exit.NUMERIC
    assert len(judged.problems) == 1
    assert "false alarm on almost_a_norm" in judged.problems[0]
    assert "false alarms 1/13" in judged.text()


# ------------------------------------------------------------------ the judgement


def _many_kills(count=40, *, killed=True, named=True):
    values = {"level": "V2", "cause": "c", "killed": killed, "named": named, "verdict": "numeric", "seconds": 1.0}
    return [Kill(bug=f"B{i}", **values) for i in range(count)]


def _many_passes(count=12):
    values = {"levels": "V2", "passed": True, "verdict": "pass", "seconds": 1.0}
    return [Pass(rewrite=f"R{i}", **values) for i in range(count)]


def _family(**changes):
    values = {
        "family": "qwen3",
        "clean": "pass",
        "unkept": [],
        "kills": _many_kills(),
        "passes": _many_passes(),
        "seconds": 1.0,
    }
    return FamilyResult(**{**values, **changes})


def test_all_killed_all_named_no_alarm_is_a_pass():
    result = judge([_family(), _family(family="gpt_oss")], seed=3, seconds=2.0)
    assert result.exit_code == Exit.PASS
    assert result.problems == []
    text = result.text()
    assert "killed 80/80, applicable qwen3 40, gpt_oss 40, false alarms 0/24" in text
    assert "40 bugs, 12 benign rewrites, causes named 80/80, gate 1, seed 3, 2 s" in text
    assert len(text.splitlines()) <= 40
    assert json.loads(result.to_json())["schema"] == "bestiary.self_test/1"


@pytest.mark.parametrize(
    ("changes", "code", "problem"),
    [
        ({"kills": _many_kills(33)}, Exit.INCONCLUSIVE, "33 bugs were planted, at least 34 needed"),
        ({"passes": _many_passes(9)}, Exit.INCONCLUSIVE, "9 benign rewrites were run, at least 10 needed"),
        (
            {"kills": _many_kills(36)[:35] + _many_kills(40, named=False)[35:]},
            Exit.INCONCLUSIVE,
            "the cause of 35 of 40 kills is named, 90% needed; not of B35, B36, B37, B38, B39",
        ),
        ({"clean": "numeric"}, Exit.NUMERIC, "qwen3: the untouched model does not pass (numeric)"),
        ({"unkept": ["O37"]}, Exit.NUMERIC, "qwen3: O37 is on the kill list and concerns nothing the family has"),
    ],
)
def test_a_self_test_that_proves_too_little_does_not_pass(changes, code, problem):
    result = judge([_family(**changes)], seed=0, seconds=1.0)
    assert result.exit_code == code
    assert result.problems == [problem]


def test_no_family_at_all_is_no_pass():
    assert judge([], seed=0, seconds=0.0).exit_code == Exit.INCONCLUSIVE


# ------------------------------------------------------------------ further catalogues and the command


def _module(monkeypatch, name, **content):
    module = types.ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return name


def test_a_catalogue_module_adds_its_bugs(monkeypatch):
    assert catalogue_with([_module(monkeypatch, "more_bugs", BUGS=(NO_BUG,))])[-1] is NO_BUG
    assert catalogue_with([]) == CATALOGUE


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "has no BUGS"), ({"BUGS": ("a string",)}, "has no BUGS"), ({"BUGS": (CATALOGUE[0],)}, "two planted bugs")],
)
def test_a_catalogue_module_that_cannot_be_used_is_refused(monkeypatch, content, message):
    name = _module(monkeypatch, "odd_bugs", **content)
    with pytest.raises(BadCatalogue, match=message):
        catalogue_with([name])
    with pytest.raises(BadCatalogue, match="no_such_module"):
        catalogue_with(["no_such_module"])


@pytest.mark.slow
def test_the_command_reports_a_survivor_and_leaves_out_what_does_not_concern_the_family(monkeypatch, tmp_path, capsys):
    """The untouched model is asked level V0 alone: that all of them pass is held elsewhere."""
    monkeypatch.setattr(planted, "CATALOGUE", (BY_ID["C01_gate_up_swapped"], BY_ID["O39a_sinks_ignored"]))
    monkeypatch.setattr(self_test, "REWRITES", [item for item in REWRITES if item.id in ("fused_qkv", "expert_loop")])
    monkeypatch.setattr(
        self_test, "run", lambda family, levels, *rest, **more: run(family, levels or "V0", *rest, **more)
    )
    name = _module(monkeypatch, "harmless_bugs", BUGS=(NO_BUG,))
    out = tmp_path / "self-test.json"
    code = main(["self-test", "qwen3", "--catalogue", name, "--json", str(out), "--quiet"])
    text = capsys.readouterr().out
    assert code == Exit.NUMERIC
    assert "Z1_nothing survives V2" in text
    assert "killed 1/2, applicable qwen3 2, false alarms 0/1" in text
    assert text.rstrip().endswith("exit 1")
    written = json.loads(out.read_text())
    assert written["exit_code"] == 1
    assert [kill["killed"] for kill in written["families"][0]["kills"]] == [True, False]


@pytest.mark.slow
def test_a_kill_matrix_says_which_other_levels_see_a_bug_and_which_do_not():
    pool = ReferencePool()
    swapped = plant("qwen3", BY_ID["C01_gate_up_swapped"], pool=pool, matrix="V0,V2,V6")
    assert (swapped.level, swapped.asked, swapped.seen_by) == ("V2", ["V0", "V6"], ["V6"])
    narrow = plant("qwen3", BY_ID["H48a_rope_table_in_bf16"], pool=pool, matrix="V0..V2")
    assert (narrow.level, narrow.asked, narrow.seen_by) == ("V6", ["V0", "V1", "V2"], [])


def test_the_command_refuses_an_unknown_family_and_an_unknown_catalogue(capsys):
    assert main(["self-test", "no_such_family"]) == Exit.REFUSED
    assert main(["self-test", "qwen3", "--catalogue", "no_such_module"]) == Exit.USAGE
    assert "no_such_module" in capsys.readouterr().err
