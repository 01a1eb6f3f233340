"""The tiny configs keep the rules that make them able to find bugs."""

import itertools

import pytest
import torch

from bestiary.verify.reference import hf_config
from bestiary.verify.tiny import LENGTH, ORIGINAL_CONTEXT, VARIANTS, layer_count, tiny_configs
from tests.verify.families import FAMILIES, REFERENCES

DIMENSIONS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
)


@pytest.fixture(params=FAMILIES)
def configs(request):
    return tiny_configs(REFERENCES[request.param])


def _full(raw):
    reference = next(r for r in REFERENCES.values() if hf_config(r, {}).model_type == raw["model_type"])
    return hf_config(reference, raw).to_dict()


def _heads(raw):
    return raw["num_attention_heads"], raw["num_key_value_heads"]


def test_base_dimensions_differ_pairwise_and_none_is_a_multiple_of_64(configs):
    base = configs["base"]
    sizes = [base[name] for name in DIMENSIONS if name in base]
    sizes += [count * base["head_dim"] for count in _heads(base)] + [base["head_dim"]]
    for a, b in itertools.combinations(sizes, 2):
        assert a != b
    assert all(size % 64 for size in sizes)
    assert base["head_dim"] * base["num_attention_heads"] != base["hidden_size"]


def test_the_root_of_hidden_is_not_exact_in_bfloat16(configs):
    root = configs["base"]["hidden_size"] ** 0.5
    assert float(torch.tensor(root, dtype=torch.bfloat16)) != root


def test_key_value_heads_are_shared_by_two_by_all_and_by_none(configs):
    ratios = {name: heads // groups for name, (heads, groups) in ((n, _heads(raw)) for n, raw in configs.items())}
    assert ratios == {"base": 2, "mha": 1, "mqa": 4, "square": 1}


def test_one_config_is_square_and_leaves_the_rest_to_defaults(configs):
    square = configs["square"]
    sides = {square[name] for name in DIMENSIONS if name in square and "experts" not in name}
    assert sides == {80}
    assert square["head_dim"] * square["num_attention_heads"] == 80
    assert "rope_parameters" not in square
    assert "rms_norm_eps" not in square


def test_one_config_has_a_large_eps_and_the_other_tie(configs):
    base, mha = _full(configs["base"]), _full(configs["mha"])
    assert mha["rms_norm_eps"] == 1e-3
    assert base["tie_word_embeddings"] != mha["tie_word_embeddings"]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_every_layer_type_stands_at_an_even_and_an_odd_index(family):
    seen = set()
    for raw in tiny_configs(REFERENCES[family]).values():
        seen |= {(kind, index % 2) for index, kind in enumerate(_full(raw)["layer_types"])}
    assert seen == set(itertools.product(["full_attention", "sliding_attention"], [0, 1]))


def test_layers_are_two_periods_and_one(configs):
    counts = {"qwen3": 5, "gemma3_text": 13, "qwen3_moe": 5, "gpt_oss": 5}
    model_type = configs["base"]["model_type"]
    assert configs["base"]["num_hidden_layers"] == counts[model_type] == layer_count(REFERENCES[model_type])


def test_twelve_experts_so_that_sorting_by_string_differs_from_sorting_by_number(configs):
    for raw in configs.values():
        names = [name for name in ("num_experts", "num_local_experts") if name in raw]
        assert len(names) <= 1
        assert all(raw[name] == 12 for name in names)


def test_the_probe_passes_four_windows_and_the_original_context(configs):
    for name in ("base", "mha"):
        window = configs[name].get("sliding_window")
        assert window is not None
        assert 4 * window < LENGTH
    assert LENGTH > ORIGINAL_CONTEXT


def test_thetas_of_different_layer_types_differ():
    rope = tiny_configs(REFERENCES["gemma3_text"])["base"]["rope_parameters"]
    thetas = [part["rope_theta"] for part in rope.values()]
    assert len(set(thetas)) == len(thetas) == 2


def test_every_variant_is_a_config_of_hugging_face(configs):
    assert set(configs) == set(VARIANTS)
    for raw in configs.values():
        assert _full(raw)["model_type"] == raw["model_type"]
