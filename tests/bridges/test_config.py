"""Configs: what transformers reads is what ours says, in either spelling of the JSON, or it is refused by name."""

import copy
from typing import Any

import pytest
import transformers

from bestiary.bridges import get_bridge, registered_bridges
from bestiary.bridges.errors import UnsupportedConfig, UnsupportedModelType
from bestiary.bridges.fields import HFFields
from bestiary.bridges.rope import share_of
from bestiary.models.config import (
    DecoderConfig,
    DynamicScaling,
    LayerType,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

from .checkpoints import FAMILIES, tiny_config

ROPES: dict[str, tuple[dict[str, Any], RopeScaling]] = {
    "linear": ({"factor": 4.0}, LinearScaling(factor=4.0)),
    "dynamic": ({"factor": 4.0}, DynamicScaling(factor=4.0, original_max_position_embeddings=64)),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 16},
        YarnScaling(factor=4.0, original_max_position_embeddings=16),
    ),
    "llama3": (
        {"factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        Llama3Scaling(factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "longrope": (
        {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "original_max_position_embeddings": 16, "factor": 4.0},
        LongRopeScaling(
            short_factor=(1.0,) * 12,
            long_factor=(2.0,) * 12,
            original_max_position_embeddings=16,
            attention_factor=1.5**0.5,
        ),
    ),
    "proportional": (
        {"partial_rotary_factor": 0.25, "factor": 2.0},
        ProportionalScaling(partial_rotary_factor=0.25, factor=2.0),
    ),
}


def parse(json: dict[str, Any]) -> DecoderConfig:
    return get_bridge(json["model_type"]).parse(json).decoder


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """The JSON of a tiny config as transformers writes it, with fields set, or removed by None."""
    json: dict[str, Any] = tiny_config(model_type).to_diff_dict() | changes
    return {name: value for name, value in json.items() if value is not None or name not in changes}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_that_states_nothing_has_the_classes_defaults(model_type: str) -> None:
    spelled_out = transformers.AutoConfig.for_model(model_type).to_diff_dict()
    assert parse({"model_type": model_type}) == parse(spelled_out)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_round_trip_is_the_identity(model_type: str) -> None:
    bridge = get_bridge(model_type)
    config = parse(tiny(model_type))
    assert bridge.parse(bridge.config_to_hf(config)).decoder == config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_size_in_our_files_survives_the_round_trip(model_type: str) -> None:
    bridge = get_bridge(model_type)
    assert bridge.decoder.sizes
    for config in bridge.decoder.sizes.values():
        assert bridge.parse(bridge.config_to_hf(config)).decoder == config


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("model_type", [m for m in FAMILIES if m != "gemma3_text"])
def test_legacy_and_v5_rope_say_the_same(model_type: str, kind: str) -> None:
    stated, scaling = ROPES[kind]
    changes = {"max_position_embeddings": 64, "rope_theta": 5e4}
    legacy = tiny(model_type, **changes, rope_scaling={"type": kind, **stated}, rope_parameters=None)
    v5 = tiny(model_type, **changes, rope_parameters={"rope_type": kind, "rope_theta": 5e4, **stated})
    assert parse(legacy) == parse(v5)
    assert parse(v5).rope.scaling == scaling
    assert parse(v5).rope.theta == 5e4
    exported = get_bridge(model_type).config_to_hf(parse(v5))
    assert transformers.AutoConfig.for_model(**exported).rope_parameters["rope_type"] == kind


def test_gemma_rope_belongs_to_layer_types() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    legacy = tiny("gemma3_text", rope_parameters=None, rope_scaling=scaling, rope_theta=2e6, rope_local_base_freq=3e4)
    parameters = {
        "full_attention": {"rope_theta": 2e6, **scaling},
        "sliding_attention": {"rope_theta": 3e4, "rope_type": "default"},
    }
    config = parse(legacy)
    assert config == parse(tiny("gemma3_text", rope_parameters=parameters))
    assert config.rope.scaling == LinearScaling(factor=8.0)
    assert config.sliding_rope is not None
    assert (config.rope.theta, config.sliding_rope.theta, config.sliding_rope.scaling) == (2e6, 3e4, None)


def test_the_legacy_base_of_olmo3_is_that_of_full_layers_alone() -> None:
    """transformers gives sliding layers its own, and the scaling to none of them."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    json = {"model_type": "olmo3", "rope_theta": 2e6, "rope_scaling": scaling}
    read, stated = parse(json), transformers.AutoConfig.for_model(**copy.deepcopy(json)).rope_parameters
    assert read == parse({"model_type": "olmo3", "rope_parameters": stated})
    assert read.sliding_rope is not None
    assert (read.rope.theta, read.rope.scaling) == (2e6, LinearScaling(factor=8.0))
    assert (read.sliding_rope.theta, read.sliding_rope.scaling) == (5e5, None)


def test_gemma_layers_by_pattern_and_by_list() -> None:
    by_pattern = parse(tiny("gemma3_text", layer_types=None, sliding_window_pattern=2))
    full, sliding = LayerType.FULL, LayerType.SLIDING
    assert by_pattern.layer_types == (sliding, full, sliding)
    assert by_pattern == parse(tiny("gemma3_text", layer_types=[sliding.value, full.value, sliding.value]))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 512])
def test_gemma_windows_that_look_both_ways_are_halved_as_transformers_does(window: int) -> None:
    json = tiny("gemma3_text", use_bidirectional_attention=True, sliding_window=window)
    config = parse(json)
    assert not config.attention.causal
    assert config.sliding_window == transformers.Gemma3TextConfig.from_dict(json).sliding_window
    exported = get_bridge("gemma3_text").config_to_hf(config)
    assert parse(exported) == config
    assert transformers.Gemma3TextConfig.from_dict(exported).sliding_window == config.sliding_window


def test_gemma_without_a_window_to_halve_is_refused() -> None:
    json = tiny("gemma3_text", use_bidirectional_attention=True) | {"sliding_window": None}
    with pytest.raises(UnsupportedConfig, match=r"^sliding_window = None where transformers halves it"):
        parse(json)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_dropout_travels(model_type: str) -> None:
    config = parse(tiny(model_type, attention_dropout=0.25))
    assert config.attention.dropout == 0.25
    exported = get_bridge(model_type).config_to_hf(config)
    assert transformers.AutoConfig.for_model(**exported).attention_dropout == 0.25


@pytest.mark.parametrize(
    ("name", "function"), [("swish", "silu"), ("gelu_new", "gelu_pytorch_tanh"), ("gelu_python", "gelu")]
)
def test_other_names_of_an_activation_are_read(name: str, function: str) -> None:
    assert parse(tiny("qwen3", hidden_act=name)).activation == function


def test_qwen3_window_starts_at_max_window_layers() -> None:
    config = parse(tiny("qwen3", layer_types=None, use_sliding_window=True, sliding_window=5, max_window_layers=2))
    assert config.layer_types == (LayerType.FULL, LayerType.FULL, LayerType.SLIDING)
    assert parse(tiny("qwen3", sliding_window=5)).sliding_window is None


def test_qwen3_moe_layers_and_names_of_the_expert_count() -> None:
    json = tiny("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2)
    assert parse(json).dense_layers == (0, 2)
    count = json.pop("num_local_experts")
    assert parse(json | {"num_experts": count}) == parse(json | {"num_local_experts": count})


def test_a_multimodal_config_gives_its_text_part() -> None:
    text = tiny("gemma3_text")
    outer = {
        "model_type": "gemma3",
        "text_config": {k: v for k, v in text.items() if k != "tie_word_embeddings"} | {"pad_token_id": 3},
        "vision_config": {"hidden_size": 16},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    parsed = get_bridge("gemma3").parse(outer)
    assert parsed.decoder == parse(text)
    assert parsed.kept["eos_token_id"] == [1, 106]
    assert parsed.kept["pad_token_id"] == 3
    assert not {"vision_config", "text_config", "torch_dtype"} & parsed.kept.keys()
    untied = get_bridge("gemma3").parse(outer | {"tie_word_embeddings": False})
    assert not untied.decoder.tie_word_embeddings


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown field": ("qwen3", {"mlp_bias": True}, "mlp_bias"),
    "attention dropout that leaves nothing": ("qwen3", {"attention_dropout": 1.0}, "attention_dropout"),
    "an activation": ("qwen3", {"hidden_act": "quick_gelu"}, "hidden_act"),
    "a wrong type": ("qwen3", {"hidden_size": "80"}, "hidden_size"),
    "a boolean for a number": ("qwen3", {"num_hidden_layers": True}, "num_hidden_layers"),
    "no layers": ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers"),
    "layer types of another length": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    "an unknown layer type": ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    "an unknown rope kind": ("qwen3", {"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type"),
    "an unknown rope key": (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}},
        "rope_parameters.twist",
    ),
    "a missing rope key": ("qwen3", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    "partial rotation": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor",
    ),
    "two thetas": ("qwen3", {"rope_theta": 1.0}, "rope_theta"),
    "two scalings": ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "two rope types": (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        "rope_parameters.type",
    ),
    "rope nested where the class wants it flat": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
    ),
    "a dtype": ("qwen3", {"dtype": "int8"}, "dtype"),
    "quantisation": ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
    "remote code": ("qwen3", {"auto_map": {"AutoModelForCausalLM": "x.py"}}, "auto_map"),
    "an encoder": ("qwen3", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "rope flat where the class wants it nested": (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        "rope_parameters.rope_type",
    ),
    "a scaling that transformers drops": (
        "gemma3_text",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling",
    ),
    "a share of more than a head": (
        "qwen3",
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
        "rope_parameters.partial_rotary_factor",
    ),
    "a soft cap that is never applied": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "layer types of one window": ("qwen3_moe", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    "a shared expert": ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
    "no q/k-norm": ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm"),
    "a step of zero": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "two expert counts": ("qwen3_moe", {"num_experts": 3}, "num_local_experts"),
    "two top-k": ("gpt_oss", {"experts_per_token": 7}, "experts_per_token"),
}


REFUSED |= {
    f"{field} = {value!r}": (model_type, {field: value}, field)
    for model_type, field, value in (
        ("qwen3", "hidden_size", -80),
        ("qwen3", "num_attention_heads", 0),
        ("qwen3", "num_attention_heads", 3),  # of 2 key/value heads
        ("qwen3", "num_key_value_heads", 0),
        ("qwen3", "head_dim", 23),
        ("qwen3", "rms_norm_eps", 0.0),
        ("qwen3", "rms_norm_eps", float("nan")),
        ("qwen3", "initializer_range", -0.1),
        ("qwen3", "pad_token_id", 1003),
        ("qwen3", "pad_token_id", "<pad>"),
        ("gemma3_text", "sliding_window", 0),
        ("gemma3_text", "final_logit_softcapping", -30.0),
        ("gemma3_text", "final_logit_softcapping", 0.0),
        ("gemma3_text", "pad_token_id", 5000),
        ("gpt_oss", "sliding_window", -1),
        ("gpt_oss", "num_key_value_heads", 0),
        ("gpt_oss", "head_dim", 0),
        ("gpt_oss", "swiglu_limit", 0.0),
        ("gpt_oss", "swiglu_alpha", -1.0),
        ("qwen3_moe", "mlp_only_layers", [1, 1]),
        ("qwen3_moe", "mlp_only_layers", [3]),
        ("qwen3_moe", "mlp_only_layers", [-1]),
        ("qwen3_moe", "mlp_only_layers", ["1"]),
        ("qwen3_moe", "num_experts_per_tok", 13),  # of 12 experts
    )
}
REFUSED |= {
    f"{kind} with {field} = {value!r}": (
        "qwen3",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": kind, **stated[0], field: value}},
        f"rope_parameters.{field}",
    )
    for kind, stated, field, value in (
        ("default", ({},), "rope_theta", 0.0),
        ("default", ({},), "rope_theta", -1e4),
        *((kind, stated, "factor", 0.0) for kind, stated in ROPES.items() if kind != "longrope"),
        ("longrope", ROPES["longrope"], "factor", -2.0),
        ("yarn", ROPES["yarn"], "original_max_position_embeddings", 0),
        ("llama3", ROPES["llama3"], "low_freq_factor", 0.0),
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name: str) -> None:
    model_type, changes, field = REFUSED[name]
    with pytest.raises(UnsupportedConfig) as caught:
        parse(tiny(model_type, **changes))
    assert caught.value.field == field
    assert caught.value.exit_code == 4
    assert repr(caught.value.value) in str(caught.value)
    assert caught.value.remedy
    assert caught.value.read_from == "config.json"


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("phi3", "resid_pdrop", 1.5),
        ("seed_oss", "residual_dropout", 1.5),
        ("deepseek_v3", "qk_rope_head_dim", 13),
        ("llama", "head_dim", 15),
    ],
)
def test_what_builds_no_model_has_the_name_it_has_in_the_file(model_type: str, field: str, value: float) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        parse({"model_type": model_type, field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_null_where_a_number_is_needed_is_refused() -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        parse(tiny("qwen3") | {"vocab_size": None})
    assert caught.value.field == "vocab_size"


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelType, match="qwen3_moe") as caught:
        get_bridge("llamantis")
    assert caught.value.exit_code == 4


def test_a_window_that_is_switched_off_may_be_anything() -> None:
    assert parse(tiny("qwen3", sliding_window=0)).sliding_window is None


def test_a_multimodal_type_on_a_flat_text_config_is_refused() -> None:
    """transformers would read none of its sizes."""
    with pytest.raises(UnsupportedConfig, match="gemma3_text") as caught:
        get_bridge("gemma3").parse(tiny("gemma3_text") | {"model_type": "gemma3"})
    assert caught.value.field == "text_config"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_field_of_the_class_is_unknown_to_the_bridge(model_type: str) -> None:
    """Everything transformers itself writes is taken or declared inert with a reason."""
    parsed = get_bridge(model_type).parse(tiny_config(model_type).to_dict())
    assert all(parsed.inert.values())
    assert parsed.decoder == parse(tiny(model_type))


def test_registered_bridges_are_the_families() -> None:
    assert set(registered_bridges()) >= set(FAMILIES)
    assert get_bridge("gemma3") is get_bridge("gemma3_text")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parsing_leaves_the_json_alone(model_type: str) -> None:
    json = tiny(model_type)
    before = copy.deepcopy(json)
    parse(json)
    assert json == before


@pytest.mark.parametrize("head_dim", [20, 24, 96, 128])
def test_the_share_of_a_head_that_turns_is_found_again(head_dim: int) -> None:
    """transformers multiplies it by head_dim and drops the fraction."""
    turning = range(2, head_dim + 1, 2)
    assert [int(head_dim * share_of(dim, head_dim)) for dim in turning] == list(turning)


@pytest.mark.parametrize(
    ("json", "turning"),
    [
        ({}, 12),
        ({"partial_rotary_factor": 0.25}, 6),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, 18),
    ],
)
def test_a_share_is_read_beside_rope_parameters_and_in_them(json: dict[str, Any], turning: int) -> None:
    assert partial(json).rotary_dim == turning


@pytest.mark.parametrize(
    "json",
    [
        {"partial_rotary_factor": 0.05},
        {"partial_rotary_factor": 0.4},  # 9 coordinates
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}},
    ],
)
def test_what_does_not_fit_a_part_of_a_head_is_refused(json: dict[str, Any]) -> None:
    """The lists of LongRoPE have one number for each pair that turns: here 6."""
    with pytest.raises(UnsupportedConfig):
        partial(json)


def partial(json: dict[str, Any]) -> Rope:
    """RoPE of a head of 24 coordinates in a family that turns half of it by default."""
    return HFFields(json, source="config.json").rope(theta=1e4, rotary_dim=24, max_positions=64, share=0.5)
