"""The bridges against real configs, shard indexes and tensor listings of published checkpoints; no weights needed."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bestiary.bridges import Bridge, Plan, TensorInfo, get_bridge, registered_bridges
from bestiary.bridges.errors import KeyMismatch, UnsupportedConfig
from bestiary.bridges.pieces import Shape
from bestiary.models import DeepseekV3
from bestiary.models.config import DecoderConfig

from .checkpoints import read_config, read_index, read_listing

# Distinct parameters of the published weights, a tied head counted once (Gemma multimodal: the text model).
PARAMETERS = {
    "Qwen__Qwen3-0.6B": 596_049_920,
    "Qwen__Qwen3-0.6B-Base": 596_049_920,
    "Qwen__Qwen3-1.7B": 1_720_574_976,
    "Qwen__Qwen3-4B": 4_022_468_096,
    "Qwen__Qwen3-4B-Thinking-2507": 4_022_468_096,
    "Qwen__Qwen3-8B": 8_190_735_360,
    "Qwen__Qwen3-14B": 14_768_307_200,
    "Qwen__Qwen3-32B": 32_762_123_264,
    "Qwen__Qwen3-30B-A3B": 30_532_122_624,
    "Qwen__Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen__Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "Qwen__Qwen3-235B-A22B": 235_093_634_560,
    "google__gemma-3-270m": 268_098_176,
    "google__gemma-3-1b-it": 999_885_952,
    "google__gemma-3-4b-it": 3_880_263_168,
    "derived__gemma-3-4b-it-text-only": 3_880_263_168,
    "google__gemma-3-12b-it-qat-q4_0-unquantized": 11_766_034_176,
    "google__gemma-3-27b-it": 27_009_346_304,
    "google__medgemma-27b-it": 27_009_346_304,
    "openai__gpt-oss-20b": 20_914_757_184,
    "openai__gpt-oss-120b": 116_829_156_672,
    "zai-org__GLM-4.5": 352_797_829_024,
    "meta-llama__Llama-3.2-1B": 1_235_814_400,
    "meta-llama__Llama-3.2-1B-Instruct": 1_235_814_400,
    "HuggingFaceTB__SmolLM2-135M": 134_515_008,
    "HuggingFaceTB__SmolLM3-3B": 3_075_098_624,
    "mistralai__Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen__Qwen2.5-0.5B": 494_032_768,
    "allenai__Olmo-3.1-32B-Instruct": 32_233_522_176,
}
IN_FP8 = "deepseek-ai__DeepSeek-V3"  # refused as published
# Figures that files of one family spell in their own way and no model of that family computes with.
NOT_COMPUTED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
    "decoder_sparse_step",
    "mlp_only_layers",
    "quantization_config",
}


@pytest.fixture(params=PARAMETERS)
def published(request: pytest.FixtureRequest, reference_data: Path) -> Path:
    return reference_data / "hub" / str(request.param)


def bridge_and_config(folder: Path) -> tuple[Bridge, DecoderConfig, str | None]:
    json = read_config(folder)
    bridge = get_bridge(json["model_type"])
    parsed = bridge.parse(json, source=f"config of {folder.name}")
    return bridge, parsed.decoder, parsed.quantization


def reference_config(json: Mapping[str, Any]) -> Any:
    fields = {name: value for name, value in json.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(json["model_type"], **fields)
    return config.get_text_config()


def test_every_folder_of_our_families_is_listed_here(reference_data: Path) -> None:
    ours = {*registered_bridges(), "gemma3"}
    found = [path for path in sorted((reference_data / "hub").iterdir()) if (path / "config.json").exists()]
    assert {path.name for path in found if read_config(path)["model_type"] in ours} <= {*PARAMETERS, IN_FP8}


def test_the_config_round_trips(published: Path) -> None:
    bridge, config, _ = bridge_and_config(published)
    assert bridge.parse(bridge.config_to_hf(config)).decoder == config


def test_the_exported_config_means_the_same_to_transformers(published: Path) -> None:
    json = read_config(published)
    bridge, config, _ = bridge_and_config(published)
    kept = bridge.parse(json).kept
    before = reference_config(json).to_dict()
    after = reference_config({**kept, **bridge.config_to_hf(config)}).to_dict()
    for one in (before, after):  # no field of some classes, whose attention reads it all the same
        one.setdefault("head_dim", one["hidden_size"] // one["num_attention_heads"])
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    outer = {"bos_token_id", "eos_token_id", "pad_token_id"} if "text_config" in json else set()
    assert differing <= NOT_COMPUTED | outer
    if "mlp_only_layers" in before:  # one of two ways to say which layers are dense: none is
        assert config.dense_layers == ()


def test_the_model_has_the_published_number_of_parameters(published: Path) -> None:
    bridge, config, _ = bridge_and_config(published)
    model = bridge.decoder(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[published.name]
    assert model.num_parameters() == PARAMETERS[published.name]


def by_name(plan: Plan) -> Iterator[tuple[str, Shape]]:
    for transfer in plan.transfers:
        yield from transfer.hub.stored.items()


def assert_total(plan: Plan, bridge: Bridge, config: DecoderConfig, hub: Mapping[str, TensorInfo]) -> None:
    """Each stored tensor consumed once, compared, or ignored for a reason; each parameter's elements written once."""
    consumed = [name for name, _ in by_name(plan)]
    head = [] if plan.duplicate_head is None else [plan.duplicate_head[0]]
    assert sorted([*consumed, *head, *plan.ignored]) == sorted(hub)
    assert all(plan.ignored.values())
    written = {item.native: sum(piece.numel for piece in item.pieces) for item in plan.items}
    assert written == {name: prod(shape) for name, shape in bridge.parameters(config).items()}


LISTED = (
    "Qwen__Qwen3-0.6B",
    "Qwen__Qwen3-8B",
    "Qwen__Qwen3-30B-A3B-Instruct-2507",
    "openai__gpt-oss-20b",
    "Qwen__Qwen2.5-0.5B",
)


@pytest.mark.parametrize("name", LISTED)
def test_a_listing_is_consumed_to_the_last_tensor(name: str, reference_data: Path) -> None:
    folder = reference_data / "hub" / name
    bridge, config, quantization = bridge_and_config(folder)
    hub = read_listing(folder)
    assert hub is not None
    plan = bridge.plan_import(config, hub, quantization=quantization)
    assert_total(plan, bridge, config, hub)
    assert plan.ignored == {}
    assert (plan.duplicate_head is not None) == (name == "Qwen__Qwen3-0.6B")
    assert len(hub) == {"Qwen__Qwen3-30B-A3B-Instruct-2507": 18867, "openai__gpt-oss-20b": 459}.get(name, len(hub))


@pytest.mark.parametrize("name", LISTED)
def test_an_export_equals_the_listing_up_to_the_declared_differences(name: str, reference_data: Path) -> None:
    folder = reference_data / "hub" / name
    bridge, config, _ = bridge_and_config(folder)
    hub = read_listing(folder)
    assert hub is not None
    exported = dict(by_name(bridge.plan_export(config)))
    expected = {tensor: info.shape for tensor, info in hub.items() if info.dtype is torch.bfloat16}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)  # a tied head stored twice is written once
    for tensor, info in hub.items():
        if tensor.endswith("_blocks"):  # MXFP4 becomes one bf16 tensor, (E, H, 2I) or (E, I, H)
            experts, rows, grid, _ = info.shape
            expected[tensor.removesuffix("_blocks")] = (experts, grid * 32, rows)
    assert exported == expected


@pytest.mark.slow
def test_deepseek_v3_is_consumed_to_the_last_tensor_but_for_its_fp8(reference_data: Path) -> None:
    """The published weights are refused; of their bf16 twin only the layer that predicts further tokens is left."""
    folder = reference_data / "hub" / IN_FP8
    json, bridge = read_config(folder), get_bridge("deepseek_v3")
    with pytest.raises(UnsupportedConfig, match="quant_method"):
        bridge.parse(json)
    del json["quantization_config"]
    config, listed = bridge.parse(json).decoder, read_listing(folder)
    assert config == DeepseekV3.sizes["671b"].with_(padding_idx=None)
    assert bridge.parse(bridge.config_to_hf(config)).decoder == config
    assert listed is not None
    twin = {
        name: TensorInfo(info.shape, torch.bfloat16 if info.dtype is torch.float8_e4m3fn else info.dtype)
        for name, info in listed.items()
        if not name.endswith("_scale_inv")
    }
    plan = bridge.plan_import(config, twin)
    assert_total(plan, bridge, config, twin)
    assert set(plan.ignored) == {name for name in twin if ".layers.61." in name}
    exported = dict(by_name(bridge.plan_export(config)))
    assert exported == {name: info.shape for name, info in twin.items() if name not in plan.ignored}


INDEXED = {
    "Qwen__Qwen3-1.7B": 0,
    "Qwen__Qwen3-Coder-30B-A3B-Instruct": 0,
    "google__medgemma-27b-it": 439,
    "derived__gemma-3-4b-it-text-only": 0,
    "openai__gpt-oss-20b": 0,
    "HuggingFaceTB__SmolLM3-3B": 0,
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_is_consumed_to_the_last_name(name: str, reference_data: Path) -> None:
    """An index has no shapes: those of the plan's own tensors are lent to its names."""
    folder = reference_data / "hub" / name
    bridge, config, quantization = bridge_and_config(folder)
    names = read_index(folder)
    assert names is not None
    candidates = {naming.hub(item): info for naming in bridge.namings for item, info in lent(bridge, config).items()}
    nowhere = TensorInfo((1,), torch.bfloat16)
    hub = {item: candidates.get(item, nowhere) for item in names}
    plan = bridge.plan_import(config, hub, quantization=quantization)
    assert_total(plan, bridge, config, hub)
    assert len(plan.ignored) == INDEXED[name]


def lent(bridge: Bridge, config: DecoderConfig) -> dict[str, TensorInfo]:
    """Every name the rules know for this config, in any layout, with its shape."""
    found: dict[str, TensorInfo] = {}
    parameters = bridge.parameters(config)
    parameters |= {"lm_head.weight": parameters["model.embed_tokens.weight"]}
    for native, shape in parameters.items():
        rule, captures = bridge.rule_set.rule(native)
        assert rule is not None
        for source in rule.layouts.values():
            for piece in source.sized(parameters, captures).pieces(shape, captures):
                dtype = torch.uint8 if piece.hub.packed else torch.bfloat16
                found |= {name: TensorInfo(stored, dtype) for name, stored in piece.hub.stored.items()}
    return found


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_multimodal_prefixes_are_known(prefix: str, reference_data: Path) -> None:
    folder = reference_data / "hub" / "google__medgemma-27b-it"
    bridge, config, _ = bridge_and_config(folder)
    plain = {name: info for name, info in lent(bridge, config).items() if name != "lm_head.weight"}
    hub = {prefix + name.removeprefix("model."): info for name, info in plain.items()}
    vision = {"language_model.model.": "vision_tower.x", "model.language_model.": "model.vision_tower.x"}[prefix]
    hub[vision] = TensorInfo((1,), torch.bfloat16)
    plan = bridge.plan_import(config, hub)
    assert_total(plan, bridge, config, hub)
    assert list(plan.ignored) == [vision]


def test_vision_tensors_beside_a_text_model_are_extra(reference_data: Path) -> None:
    folder = reference_data / "hub" / "derived__gemma-3-4b-it-text-only"
    bridge, config, _ = bridge_and_config(folder)
    hub = lent(bridge, config) | {"vision_tower.x": TensorInfo((1,), torch.bfloat16)}
    with pytest.raises(KeyMismatch) as caught:
        bridge.plan_import(config, hub)
    assert caught.value.extra == ("vision_tower.x",)
