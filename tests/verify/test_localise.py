"""The first divergence is the place of the bug, with the pattern that it leaves."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from bestiary.bridges import get_bridge
from bestiary.models import Decoder, DecoderConfig
from bestiary.models.config import LayerType
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.localise import ModuleMap, by_position, layer_of, localise
from bestiary.verify.reference import Reference
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_config
from bestiary.verify.verdict import Divergence
from tests.verify.families import FAMILIES, REFERENCES


def _parted(
    family: str,
    *,
    config: Callable[[DecoderConfig], DecoderConfig] | None = None,
    model: Callable[[Decoder], None] | None = None,
    case: str = "base",
    inputs: Inputs | None = None,
) -> Divergence | None:
    """Where our model, changed, parts from the reference."""
    raw = tiny_config(REFERENCES[family], case)
    reference = Reference(REFERENCES[family], raw, 0)
    side = OurSide(get_bridge(family))
    if config is not None:
        side.config(config)
    if model is not None:
        side.model(model)
    listed = reference.config.to_dict()
    return localise(
        side.build(raw, reference.state(), torch.float64),
        reference.trace(inputs or _inputs(raw)),
        side.current.module_map,
        inputs or _inputs(raw),
        case=case,
        layer_types=listed.get("layer_types") or ["all"] * listed["num_hidden_layers"],
        dense_layers={1} if family == "qwen3_moe" else set(),
    )


def _inputs(raw) -> Inputs:
    return Inputs(tokens(raw["vocab_size"], 2, 72, 1))


@torch.no_grad()
def _scale(module: nn.Module, factor: float) -> None:
    module.get_parameter("weight").mul_(factor)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_models_do_not_part(family):
    assert _parted(family) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_weight_is_found_at_its_module_and_layer(family):
    name = "model.layers.2.self_attn.v_proj"
    found = _parted(family, model=lambda model: _scale(model.get_submodule(name), 1.5))
    assert found is not None
    assert (found.module, found.layer, found.inputs_equal) == (name, 2, True)
    assert "only_layers:2" in found.pattern
    assert found.max_over_std is not None
    assert found.max_over_std > 0.1


def test_a_constant_factor_is_recognised():
    found = _parted("qwen3", model=lambda model: _scale(model.get_submodule("model.layers.1.mlp.up_proj"), 0.125))
    assert found is not None
    assert found.module == "model.layers.1.mlp.up_proj"
    assert "constant_ratio:0.125" in found.pattern


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_a_window_one_too_wide_shows_at_the_position_of_the_window_and_in_sliding_layers_only(family):
    found = _parted(family, config=lambda config: replace(config, sliding_window=17))
    assert found is not None
    assert found.module.endswith("self_attn")
    assert found.tensor == "input of o_proj"
    assert found.layer_type == "sliding_attention"
    assert found.position == 16
    assert {"only_positions>=16", "only_layer_type:sliding_attention"} <= set(found.pattern)


def test_windows_on_the_wrong_layers_start_in_the_first_wrong_layer():
    def swapped(config: DecoderConfig) -> DecoderConfig:
        other = {LayerType.FULL: LayerType.SLIDING, LayerType.SLIDING: LayerType.FULL}
        return replace(config, layer_types=tuple(other[kind] for kind in config.layer_types))

    found = _parted("gpt_oss", config=swapped)
    assert found is not None
    assert (found.layer, found.position, found.tensor) == (0, 16, "input of o_proj")


def test_a_wrong_router_is_not_blamed_on_the_experts():
    def normalised(config: DecoderConfig) -> DecoderConfig:
        assert config.moe is not None
        return replace(config, moe=replace(config.moe, router=replace(config.moe.router, normalize=False)))

    found = _parted("qwen3_moe", config=normalised)
    assert found is not None
    assert found.module == "model.layers.0.mlp.gate"
    assert found.tensor == "output 1"
    assert found.hf_module == "model.layers.0.mlp.gate"
    assert "only_moe_layers" in found.pattern


def test_names_that_differ_go_through_the_module_map():
    @torch.no_grad()
    def shifted(model: Decoder) -> None:
        model.get_parameter("model.layers.3.mlp.gate.bias").add_(1.0 * torch.arange(12))

    found = _parted("gpt_oss", model=shifted)
    assert found is not None
    assert (found.module, found.hf_module) == ("model.layers.3.mlp.gate", "model.layers.3.mlp.router")


def test_a_wrong_embedding_is_outside_all_layers():
    found = _parted("gemma3_text", config=lambda config: replace(config, embedding_multiplier=1.0))
    assert found is not None
    assert (found.module, found.layer, found.layer_type) == ("model.embed_tokens", None, None)


def test_a_soft_cap_left_out_is_found_at_the_head():
    found = _parted("gemma3_text", config=lambda config: replace(config, final_logit_softcap=None))
    assert found is not None
    assert found.module == "lm_head"


def test_a_model_that_gives_nan_parts_there():
    @torch.no_grad()
    def broken(model: Decoder) -> None:
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = torch.nan

    found = _parted("qwen3", model=broken)
    assert found is not None
    assert found.module == "model.layers.1.mlp.down_proj"
    assert found.max_over_std is None
    assert found.ours is None


def test_a_module_map_covers_what_lies_below_a_pattern():
    names = ModuleMap({"model.layers.*.mlp.gate": "model.layers.*.mlp.router"})
    assert names.theirs("model.layers.11.mlp.gate") == "model.layers.11.mlp.router"
    assert names.theirs("model.layers.11.mlp.gate.weight") == "model.layers.11.mlp.router.weight"
    assert names.theirs("model.layers.11.mlp.gate_proj") == "model.layers.11.mlp.gate_proj"


def test_positions_are_found_in_every_layout():
    flat = torch.arange(2 * 5 * 12.0).reshape(2, 5, 12)
    heads = flat.reshape(2, 5, 3, 4)
    for layout in (flat, heads, heads.transpose(1, 2), flat.reshape(10, 12)):
        assert torch.equal(by_position(layout, 2, 5), flat)
    assert by_position(torch.zeros(7), 2, 5) is None


def test_layers_are_numbers_between_dots():
    assert layer_of("model.layers.12.mlp") == layer_of("model.layers.12") == 12
    assert layer_of("model.norm") is None
