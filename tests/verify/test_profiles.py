"""What a verdict keeps of where the error lies: where it is largest, and never more than a page can draw."""

import json
from dataclasses import replace

import pytest
import torch

from bestiary.verify import verify
from bestiary.verify.coverage import hf_value, read_as, read_in
from bestiary.verify.planted import CATALOGUE
from bestiary.verify.profiles import position_errors, record, rounded
from bestiary.verify.run import run
from bestiary.verify.sweep import Variant
from bestiary.verify.verdict import MAX_POINTS, LayerError, Profile
from tests.models.tiny import tiny_config


@pytest.fixture(scope="module")
def verdict():
    return verify("gemma3_text", level="V2,V6")


@pytest.mark.parametrize("length", [1, 5, MAX_POINTS, MAX_POINTS + 1, 3 * MAX_POINTS + 7])
def test_the_position_of_an_error_is_found_again_in_the_profile(length):
    reference = torch.randn(2, length, 9, dtype=torch.float64)
    ours = reference.clone()
    ours[1, length - 1, 4] += 1.0
    stride, figures = position_errors(ours, reference)
    assert len(figures) <= MAX_POINTS
    assert figures.index(max(figures)) == (length - 1) // stride
    assert figures[:-1] == [0.0] * (len(figures) - 1)
    assert figures[-1] == pytest.approx(1 / float(reference.std(correction=0)), rel=1e-2)


def test_logits_of_one_sequence_and_a_given_scale():
    reference = torch.zeros(3, 4)
    ours = reference.clone()
    ours[1] = 0.5
    assert position_errors(ours, reference, scale=2.0) == (1, [0.0, 0.25, 0.0])


def test_a_figure_that_is_not_finite_and_shapes_that_differ_are_no_number():
    reference = torch.zeros(3, 4)
    assert position_errors(reference + torch.nan, reference, scale=1.0) == (1, [None] * 3)
    assert position_errors(reference[:2], reference) == (1, [])
    assert rounded(float("inf")) is None


def test_checks_of_one_level_and_case_fill_one_profile():
    profiles: list[Profile] = []
    record(profiles, "V2", "base", 1e-10, positions=(1, [0.0]))
    record(profiles, "V2", "base", 1e-10, layers=[LayerError(module="m", figure=0.0)])
    record(profiles, "V6", "base", 2e-5, positions=(1, [1.0]))
    assert [(one.level, len(one.layers), one.positions) for one in profiles] == [("V2", 1, [0.0]), ("V6", 0, [1.0])]


@pytest.mark.slow
def test_a_run_records_every_layer_and_position_of_every_case(verdict):
    by_level = {level: [one for one in verdict.profiles if one.level == level] for level in ("V2", "V6")}
    assert [one.case for one in by_level["V2"]] == [one.case for one in by_level["V6"]] == list(verdict.cases)
    for one in by_level["V2"]:
        layers = [entry.layer for entry in one.layers if entry.layer is not None]
        assert layers == list(range(verdict.cases[one.case]["num_hidden_layers"]))
        assert {entry.layer_type for entry in one.layers} == {None, "full_attention", "sliding_attention"}
        assert len(one.positions) > 4 * 16
    assert len(json.dumps([one.model_dump() for one in verdict.profiles])) < 40_000


@pytest.mark.slow
def test_the_profile_shows_where_a_planted_bug_begins():
    """A window one token too wide: positions up to the window agree, and so do the layers before the first sliding."""
    bug = next(bug for bug in CATALOGUE if bug.id == "G22a_window_plus_one")
    found = run("gemma3_text", "V2", mutate_ours=bug.ours, only=["base"])
    (profile,) = [one for one in found.profiles if one.case == "base"]
    good = [figure is not None and figure <= profile.gate for figure in profile.positions]
    assert good[:16] == [True] * 16
    assert not all(good)
    assert profile.layers[0].module == "model.embed_tokens"
    assert profile.layers[0].figure <= profile.gate < profile.layers[-1].figure


# ------------------------------------------------------------------ config coverage


def test_coverage_says_what_ours_made_of_a_value_and_where():
    (eps,) = [
        one for one in verify("qwen3", level="V3", only=["rms_norm_eps=0.0001"]).config if one.field == "rms_norm_eps"
    ]
    assert (eps.before, eps.value, eps.ours) == (1e-6, 1e-4, "equal")
    assert any(text.startswith("norm.eps: ") and text.endswith("→ 0.0001") for text in eps.read_as)
    file, _, line = eps.read_in.partition(":")
    assert file.startswith("bridges/")
    assert int(line) > 0


def test_a_field_that_nobody_reads_is_read_nowhere():
    assert read_in("bestiary.bridges.qwen3", "frobnicate") == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [("a", 1), ("b.c", 2), ("b.d", 5), ("b[yarn].c", None), ("nothing", None)],
)
def test_the_value_replaced_comes_from_the_file_and_else_from_the_class(field, value):
    variant = Variant(field, 0, {}, {"a": 1, "b": {"c": 2}})
    assert hf_value(variant, {"a": 9, "b": {"d": 5}}) == value


def test_leaves_that_changed_are_named_with_both_values():
    before = tiny_config("qwen3")
    after = before.with_(norm=replace(before.norm, eps=0.5))
    assert f"norm.eps: {before.norm.eps} → 0.5" in read_as(before, after)
    assert read_as(before, before) == []
