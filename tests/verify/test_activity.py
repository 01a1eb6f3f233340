"""The audit finds what a test cannot see: dead parameters, clamps that never act, unsteady references."""

import pytest
import torch

from bestiary.verify.activity import audit, router_margin, weaknesses
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.reference import Reference
from bestiary.verify.tiny import FROM_DEFAULTS, tiny_config, tiny_configs
from bestiary.verify.verdict import Activity
from tests.verify.families import REFERENCES


def _inputs(raw) -> Inputs:
    return Inputs(tokens(raw["vocab_size"], 3, 72, 1)).with_labels()


@pytest.mark.parametrize("family", REFERENCES)
def test_the_tiny_configs_are_active(family):
    audits = {
        name: audit(Reference(REFERENCES[family], raw, 11), _inputs(raw))
        for name, raw in tiny_configs(REFERENCES[family]).items()
    }
    assert weaknesses(audits, FROM_DEFAULTS) == []


def test_clipping_is_measured_where_a_family_clips():
    raw = tiny_config(REFERENCES["gpt_oss"], "base")
    shares = audit(Reference(REFERENCES["gpt_oss"], raw, 0), _inputs(raw)).clipped
    assert shares.keys() == {"clamp to 0.5"}
    assert 0.1 < shares["clamp to 0.5"] < 0.9
    raw = tiny_config(REFERENCES["gemma3_text"], "base")
    assert audit(Reference(REFERENCES["gemma3_text"], raw, 0), _inputs(raw)).clipped.keys() == {"tanh"}


def test_a_limit_that_clips_nothing_is_a_weakness():
    raw = {**tiny_config(REFERENCES["gpt_oss"], "base"), "swiglu_limit": 50.0}
    found = weaknesses({"base": audit(Reference(REFERENCES["gpt_oss"], raw, 0), _inputs(raw))})
    assert found == ["base: clamp to 50 clips 0.0% of values, 10% needed"]


def test_a_parameter_without_effect_is_dead():
    def silence(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("model.layers.1.self_attn.o_proj.weight").zero_()

    raw = tiny_config(REFERENCES["qwen3"], "square")
    silenced = Reference(REFERENCES["qwen3"], raw, 0, mutate=silence)
    dead = audit(silenced, _inputs(raw)).dead_params
    assert "model.layers.1.self_attn.v_proj.weight" in dead
    assert "model.layers.0.self_attn.v_proj.weight" not in dead


def test_an_expert_that_no_token_reaches_is_dead():
    def starve(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("model.layers.0.mlp.router.bias")[4] = -100.0

    raw = tiny_config(REFERENCES["gpt_oss"], "base")
    dead = audit(Reference(REFERENCES["gpt_oss"], raw, 0, mutate=starve), _inputs(raw)).dead_params
    assert {"model.layers.0.mlp.experts.gate_up_proj[4]", "model.layers.0.mlp.experts.down_proj[4]"} <= set(dead)


def test_a_slice_must_live_in_one_config_and_a_parameter_in_each():
    both, one = Activity(dead_params=["w[3]", "v"]), Activity(dead_params=["w[3]"])
    alive = Activity()
    assert weaknesses({"base": both, "mha": alive}) == ["base: v moves no logit"]
    assert "w[3] moves no logit in any config" in weaknesses({"base": one, "mha": one})
    assert weaknesses({"base": Activity(deterministic=False)}) == [
        "base: the reference gives different logits for the same input"
    ]


def test_the_router_margin_is_the_smallest_gap_at_the_cut():
    raw = tiny_config(REFERENCES["qwen3_moe"], "base")
    reference = Reference(REFERENCES["qwen3_moe"], raw, 0)
    margin = router_margin(reference, _inputs(raw))
    gaps = []
    for layer in reference.output(_inputs(raw))["router_logits"]:
        ordered = layer.sort(descending=True).values
        gaps.append(float((ordered[:, 2] - ordered[:, 3]).min()))
    assert margin == min(gaps) > 0
    assert (
        router_margin(Reference(REFERENCES["qwen3"], tiny_config(REFERENCES["qwen3"], "base"), 0), _inputs(raw)) is None
    )
