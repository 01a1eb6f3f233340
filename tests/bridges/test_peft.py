"""LoRA adapters between bestiary and PEFT, both ways, on transformers' models in true float64.

What an expert's adapter should add is written down here in Hugging Face's layout, apart from PEFT and from our code.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from bestiary.bridges.errors import UnsupportedAdapter, UnsupportedLoad
from bestiary.bridges.storage import SINGLE
from bestiary.models import AutoDecoder, LoRAConfig, Qwen3
from bestiary.models.errors import InvalidConfig
from bestiary.models.lora import sites
from bestiary.verify.measure import bit_equal, max_over_std
from bestiary.verify.reference import promoted

from .adapters import (
    CONFIG,
    EVERYTHING,
    EXPERTS,
    ROUTED,
    WEIGHTS,
    logits,
    lora,
    ours,
    peft_made,
    reference,
    saved,
    with_peft,
)
from .checkpoints import FAMILIES, edit_json, multimodal_config, reload

EXACT = 1e-10
CHOICES = ("q_proj", "0.self_attn.*", "mlp.*_proj", "experts.gate_up_proj", "2.mlp.experts.*", "mlp.gate")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of a family."""
    return partial(saved, tmp_path_factory.mktemp("bases"))


# ---------------------------------------------------------------------------------------------------- ours to PEFT


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_our_adapter_and_computes_our_logits(
    family: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    config = lora(*EVERYTHING[family], rank_pattern=(("o_proj", 5),), alpha_pattern=(("1.self_attn.v_proj", 2.5),))
    model = ours(base(family), config)
    folder = model.save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    theirs = with_peft(family, folder)
    assert max_over_std(logits(model), logits(theirs)) < EXACT
    assert max_over_std(logits(model), logits(reference(family))) > 0.1
    stored, held = load_file(folder / WEIGHTS), get_peft_model_state_dict(theirs)
    assert stored.keys() == held.keys()
    assert all(torch.equal(stored[name], held[name]) for name in stored)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    family=st.sampled_from(ROUTED),
    targets=st.sets(st.sampled_from(CHOICES), min_size=1),
    r=st.integers(1, 5),
    alpha=st.sampled_from([1.0, 2.5, 12.0]),
    rslora=st.booleans(),
    special=st.integers(1, 4),
)
def test_any_choice_travels_to_peft_and_back(
    base: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    targets: set[str],
    r: int,
    alpha: float,
    rslora: bool,
    special: int,
) -> None:
    first = min(targets)
    config = lora(*sorted(targets), r=r, alpha=alpha, rslora=rslora, rank_pattern=((first, special),))
    model = ours(base(family), config)
    folder = model.save_pretrained(tmp_path_factory.mktemp("adapter"))
    assert max_over_std(logits(model), logits(with_peft(family, folder))) < EXACT
    again = ours(base(family), folder)
    assert torch.equal(logits(again), logits(model))
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", ROUTED)
def test_each_expert_gets_its_own_product_in_hugging_faces_layout(
    family: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """The file's factors, unpacked by hand (A experts slowest, B experts fastest), are the delta of each expert."""
    model = ours(base(family), lora("experts.*", r=2, alpha=6.0))
    stored = load_file(model.save_pretrained(tmp_path / "adapter") / WEIGHTS)
    by_hand = reference(family)
    state = dict(model.state_dict())
    experts = 12
    layers = sorted({int(name.split(".")[2]) for name in state if "lora" in name})
    assert layers == ([0, 2] if family == "qwen3_moe" else [0, 1, 2])
    for layer in layers:
        owner = f"model.layers.{layer}.mlp.experts"
        for projection, stem in (("gate_up_proj", f"{owner}.base_layer"), ("down_proj", owner)):
            flat_a, flat_b = (stored[f"base_model.model.{stem}.lora_{side}.weight"] for side in "AB")
            low, high = (state[f"{owner}.{projection}_lora_{side}"] for side in "AB")
            weight = by_hand.get_parameter(f"{owner}.{projection}")
            for e in range(experts):
                delta = 3.0 * high[e] @ low[e]  # ours: (out, in), gate rows then up rows
                if family == "gpt_oss":
                    if projection == "gate_up_proj":
                        gate, up = delta.chunk(2)
                        delta = torch.stack([gate, up], dim=1).flatten(0, 1)  # rows alternate
                    delta = delta.T
                with torch.no_grad():
                    weight[e] += delta
                mine = 3.0 * flat_b[:, e::experts] @ flat_a[2 * e : 2 * e + 2]
                assert max_over_std(mine.T if family == "gpt_oss" else mine, delta) < EXACT
            assert len({tuple(low[e].flatten().tolist()) for e in range(experts)}) == experts
    assert max_over_std(logits(model), logits(by_hand)) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_equals_unmerged_in_transformers(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    model = ours(base(family), lora(*EVERYTHING[family]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = model.save_pretrained(tmp_path / "adapter")
    streams = [dict(model.named_hf_tensors()) for _ in range(3)]
    full = model.save_pretrained(tmp_path / "full", merge=True)
    assert all(bit_equal(before[name], tensor) for name, tensor in model.state_dict().items())
    stored = load_file(full / SINGLE)
    assert not any("lora" in name for name in stored)
    assert all(stored.keys() == s.keys() and all(bit_equal(stored[n], s[n]) for n in stored) for s in streams)
    with promoted():
        merged = reload(full, experts_implementation="eager").eval()
    assert max_over_std(logits(merged), logits(with_peft(family, adapter))) < EXACT
    plain = AutoDecoder.from_pretrained(full)
    model.merge_lora()
    assert torch.equal(logits(plain), logits(model))
    again = dict(model.named_hf_tensors())
    assert all(bit_equal(stored[name], again[name]) for name in stored)


def test_bf16_base_and_fp32_adapters_round_where_peft_rounds(tmp_path: Path) -> None:
    """PEFT keeps adapters in fp32 on a bfloat16 base; so do we, and add before the one cast."""
    reference("qwen3", torch.bfloat16).save_pretrained(tmp_path / "base")
    mine = ours(tmp_path / "base", lora("*_proj", dtype=torch.float32))
    folder = mine.save_pretrained(tmp_path / "adapter")
    assert {tensor.dtype for tensor in load_file(folder / WEIGHTS).values()} == {torch.float32}
    again = ours(tmp_path / "base", folder)
    assert {p.dtype for p in again.parameters() if p.requires_grad} == {torch.float32}
    theirs = PeftModel.from_pretrained(reference("qwen3", torch.bfloat16), folder).eval().base_model.model
    names = [site.name for site in sites(mine)]
    assert len(names) == 21
    for name in names:
        layer = mine.get_submodule(name)
        assert isinstance(layer, torch.nn.Linear)
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert bit_equal(layer(x), theirs.get_submodule(name)(x))
        assert bit_equal(again.get_submodule(name)(x), layer(x))


def test_adapters_take_the_models_dtype_unless_theirs_is_wider(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = ours(base("qwen3"), lora("q_proj", dtype=torch.float32)).save_pretrained(tmp_path / "adapter")
    for model_dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        model = AutoDecoder.from_pretrained(base("qwen3"), dtype=model_dtype, lora=folder)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {expected}


# ---------------------------------------------------------------------------------------------------- PEFT to ours

MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "two modules": ("qwen3", {"target_modules": ["q_proj", "v_proj"]}),
    "all linear, rsLoRA, dropout": ("qwen3", {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.1}),
    "a regular expression, patterns": (
        "qwen3",
        {
            "target_modules": r".*layers\.[02]\..*(o_proj|gate_proj)",
            "rank_pattern": {"o_proj": 2},
            "alpha_pattern": {r"layers\.2\..*gate_proj": 5},
        },
    ),
    "one layer": ("qwen3", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "without one layer": ("qwen3", {"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}),
    "gemma, all linear": ("gemma3_text", {"target_modules": "all-linear"}),
    "moe, all linear": ("qwen3_moe", {"target_modules": "all-linear"}),
    "moe, names of the MLP": ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "moe, one expert projection": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
    "moe, the other one": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "moe, both, of one layer, and a dense MLP": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": [*(f"2.{name}" for name in EXPERTS), "mlp.gate_proj.weight"]},
    ),
    "gpt-oss, everything": (
        "gpt_oss",
        {
            "target_modules": "all-linear",
            "target_parameters": [*EXPERTS, "mlp.router.weight"],
            "rank_pattern": {"experts.down_proj": 3},
        },
    ),
    "gpt-oss, one expert projection": ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
    "gpt-oss, the other one": ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
}


@pytest.mark.parametrize("case", MADE)
def test_an_adapter_made_by_peft_gives_its_logits_here(case: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    family, options = MADE[case]
    theirs = peft_made(family, tmp_path / "adapter", **options)
    model = ours(base(family), tmp_path / "adapter")
    assert max_over_std(logits(model), logits(theirs)) < EXACT
    assert max_over_std(logits(model), logits(reference(family))) > 0.1
    trainable = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == trainable
    again = ours(base(family), model.save_pretrained(tmp_path / "again"))
    assert torch.equal(logits(again), logits(model))


def test_dropout_and_scaling_come_along(base: Callable[[str], Path], tmp_path: Path) -> None:
    peft_made("qwen3", tmp_path, target_modules=["q_proj"], lora_dropout=0.25, use_rslora=True, r=9)
    config = ours(base("qwen3"), tmp_path).decoder_config.lora
    assert config == LoRAConfig(r=9, alpha=6.0, targets=("q_proj",), dropout=0.25, rslora=True)
    assert config is not None
    assert config.scaling == 2.0


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kinds", [("gate", "up", "down"), ("gate", "up"), ("up",), ("down",)], ids="+".join)
def test_adapters_of_single_experts_become_one(
    kinds: tuple[str, ...], rslora: bool, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """The layout from before transformers 5, and of inference engines: one pair per expert and projection."""
    by_hand, generator = reference("qwen3_moe"), torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    scaling = 6.0 / (2**0.5 if rslora else 2)
    for layer in (0, 2):
        owner = f"model.layers.{layer}.mlp.experts"
        width = by_hand.get_parameter(f"{owner}.down_proj").shape[-1]
        rows = {"gate": slice(0, width), "up": slice(width, 2 * width), "down": slice(None)}
        for e in range(12):
            for kind in kinds:
                weight = by_hand.get_parameter(f"{owner}.{'down_proj' if kind == 'down' else 'gate_up_proj'}")
                region = weight.data[e][rows[kind]]
                low = torch.randn(2, region.shape[1], generator=generator, dtype=torch.float64)
                high = torch.randn(region.shape[0], 2, generator=generator, dtype=torch.float64) * 0.1
                region += scaling * high @ low
                stem = f"base_model.model.{owner}.{e}.{kind}_proj"
                tensors |= {f"{stem}.lora_A.weight": low, f"{stem}.lora_B.weight": high}
    save_file(tensors, tmp_path / WEIGHTS)
    names = [f"{kind}_proj" for kind in kinds]
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "use_rslora": rslora,
        "target_modules": names,
        "lora_dropout": 0.05,
    }
    (tmp_path / CONFIG).write_text(json.dumps(config))
    model = ours(base("qwen3_moe"), tmp_path)
    assert max_over_std(logits(model), logits(by_hand)) < EXACT
    assert max_over_std(logits(model.train()), logits(by_hand)) < EXACT  # dropout stays behind
    folder = model.save_pretrained(tmp_path / "fused")
    assert max_over_std(logits(model), logits(with_peft("qwen3_moe", folder))) < EXACT


def test_adapters_of_a_multimodal_gemma_find_the_text_model(base: Callable[[str], Path], tmp_path: Path) -> None:
    theirs = peft_made("gemma3_text", tmp_path, target_modules=["q_proj", "down_proj"])
    for prefix in ("model.language_model.", "language_model.model."):
        stored = load_file(tmp_path / WEIGHTS)
        renamed = {name.replace("model.model.model.", f"model.model.{prefix}"): t for name, t in stored.items()}
        save_file(renamed, tmp_path / WEIGHTS)
        assert max_over_std(logits(ours(base("gemma3_text"), tmp_path)), logits(theirs)) < EXACT
        save_file(stored, tmp_path / WEIGHTS)


def test_an_adapter_of_a_multimodal_base_fits_the_multimodal_model(tmp_path: Path) -> None:
    """PEFT loads the base that the folder names: modules have a prefix there, and its vision tower has a q_proj too."""
    with promoted():
        torch.manual_seed(0)
        theirs = transformers.Gemma3ForConditionalGeneration(multimodal_config()).eval()
    theirs.save_pretrained(tmp_path / "base")
    model = ours(tmp_path / "base", lora("q_proj", "0.mlp.down_proj", rank_pattern=(("1.self_attn.q_proj", 2),)))
    folder, expected = model.save_pretrained(tmp_path / "adapter"), logits(model)
    assert max_over_std(expected, logits(theirs)) > 0.01
    wrapped = with_peft(theirs, folder)
    assert max_over_std(expected, logits(wrapped)) < EXACT
    assert [name for name, _ in wrapped.named_parameters() if "vision_tower" in name and "lora" in name] == []
    assert torch.equal(logits(AutoDecoder.from_pretrained(folder)), expected)


# ---------------------------------------------------------------------------------------------------- reloading


def test_an_adapter_folder_that_names_its_base_is_a_source(base: Callable[[str], Path], tmp_path: Path) -> None:
    model = ours(base("qwen3"), lora("*_proj"))
    folder = model.save_pretrained(tmp_path / "adapter")
    for cls in (AutoDecoder, Qwen3):
        again = cls.from_pretrained(folder)
        assert torch.equal(logits(again), logits(model))
        assert again.name_or_path == str(base("qwen3"))
    with pytest.raises(UnsupportedLoad, match="is an adapter itself"):
        AutoDecoder.from_pretrained(folder, lora=lora("q_proj"))
    edit_json(folder / CONFIG, base_model_name_or_path=None)
    with pytest.raises(UnsupportedLoad, match="names no base_model_name_or_path"):
        AutoDecoder.from_pretrained(folder)


def test_load_adapter_replaces_values(base: Callable[[str], Path], tmp_path: Path) -> None:
    config = lora("*_proj")
    first, second = (ours(base("qwen3_moe"), config, seed) for seed in (1, 2))
    assert max_over_std(logits(first), logits(second)) > 0.1
    second.load_adapter(first.save_pretrained(tmp_path / "adapter"))
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize(
    "other", [lora("q_proj"), lora("*_proj", r=2), lora("*_proj", alpha=1.0), lora("*_proj", rslora=True)], ids=repr
)
def test_load_adapter_refuses_one_that_differs_and_changes_nothing(
    other: LoRAConfig, base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = ours(base("qwen3"), other).save_pretrained(tmp_path / "adapter")
    model = ours(base("qwen3"), lora("*_proj"))
    expected = logits(model)
    with pytest.raises(UnsupportedAdapter, match=r"in the adapter and .* in the model"):
        model.load_adapter(folder)
    assert torch.equal(logits(model), expected)


# ---------------------------------------------------------------------------------------------------- PEFT on our model


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
def test_peft_wraps_our_linear_layers(targets: Any, base: Callable[[str], Path], tmp_path: Path) -> None:
    wrapped = get_peft_model(ours(base("qwen3"), None), LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    wrapped.save_pretrained(tmp_path)
    expected = logits(wrapped.eval())
    assert max_over_std(logits(with_peft("qwen3", tmp_path)), expected) < EXACT
    assert max_over_std(logits(ours(base("qwen3"), tmp_path)), expected) < EXACT


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"target_modules": ["q_proj", "v_proj"]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    ],
)
def test_two_adapters_on_one_layer_are_refused(family: str, options: Any, base: Callable[[str], Path]) -> None:
    model = ours(base(family), lora("v_proj", "down_proj", "gate" if family in ROUTED else "v_proj"))
    with pytest.raises(InvalidConfig, match="has an adapter of its own") as caught:
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    assert "merge_lora" in str(caught.value)


def test_peft_may_wrap_the_layers_that_have_none(base: Callable[[str], Path]) -> None:
    model = ours(base("qwen3"), lora("v_proj"))
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    model = ours(base("qwen3"), lora("q_proj"))
    model.merge_lora()
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def test_peft_may_not_wrap_experts_that_lie_otherwise_here(base: Callable[[str], Path]) -> None:
    """Its file would name Hugging Face's parameter and hold our order of gate and up rows: the shapes agree."""
    options: dict[str, Any] = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(InvalidConfig, match="lie otherwise than in Hugging Face's model"):
        get_peft_model(ours(base("gpt_oss"), None), LoraConfig(task_type="CAUSAL_LM", **options))
    get_peft_model(ours(base("qwen3_moe"), None), LoraConfig(task_type="CAUSAL_LM", **options))
