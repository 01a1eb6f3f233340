"""What an adapter folder cannot be, read or written: each refused by name, with the remedy, and nothing half-done."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bestiary.bridges import get_bridge, save_adapter
from bestiary.bridges.errors import (
    CheckpointNotFound,
    ConfigChanged,
    CorruptCheckpoint,
    FolderNotEmpty,
    KeyMismatch,
    UnsupportedAdapter,
    UnsupportedConfig,
)
from bestiary.bridges.rules import Rule
from bestiary.bridges.storage import SINGLE
from bestiary.kernels.errors import BestiaryError
from bestiary.models import AutoDecoder, Decoder, replace_modules, resize_token_embeddings
from bestiary.models.layers.linear import Linear

from .adapters import CONFIG, EXPERTS, WEIGHTS, lora, ours, peft_made, saved
from .checkpoints import edit_json


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of a family."""
    return partial(saved, tmp_path_factory.mktemp("bases"))


# ---------------------------------------------------------------------------------------------------- refusals: reading


@pytest.fixture
def adapter(base: Callable[[str], Path], tmp_path: Path) -> Path:
    """A sound adapter folder for the tiny Qwen3, to be damaged."""
    return ours(base("qwen3"), lora("q_proj", "down_proj")).save_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("task_type", "SEQ_CLS"),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("alora_invocation_tokens", [5]),
        ("ensure_weight_tying", True),
        ("loftq_config", {"loftq_bits": 4}),
        ("megatron_config", {"x": 1}),
        ("a_field_of_tomorrow", 3),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    field: str, value: Any, adapter: Path, base: Callable[[str], Path]
) -> None:
    edit_json(adapter / CONFIG, **{field: value})
    with pytest.raises(UnsupportedConfig, match=rf"^{field} = ") as caught:
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert caught.value.exit_code == 4
    assert "merge_and_unload" in str(caught.value)
    assert str(adapter / CONFIG) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", "three"),
        ("lora_alpha", "high"),
        ("lora_dropout", [0.1]),
        ("use_rslora", "yes"),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("target_modules", "("),
        ("exclude_modules", "("),
        ("layers_to_transform", "1"),
        ("layers_to_transform", [1.5]),
        ("layers_pattern", "("),
        ("target_parameters", "experts.down_proj"),
    ],
)
def test_a_field_of_the_wrong_type_is_corruption(
    field: str, value: Any, adapter: Path, base: Callable[[str], Path]
) -> None:
    edit_json(adapter / CONFIG, **{field: value})
    with pytest.raises(CorruptCheckpoint, match=field):
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers_to_transform": [1]}, "layers.0.self_attn.q_proj.lora_A.weight (outside layers_to_transform = [1])"),
        ({"layers_to_transform": 0}, "layers.1.self_attn.q_proj.lora_A.weight (outside layers_to_transform = [0])"),
        ({"layers_to_transform": [0, 1, 2], "layers_pattern": "blocks"}, "with layers_pattern = ['blocks']"),
        ({"exclude_modules": ["layers.2.mlp.down_proj"]}, "layers.2.mlp.down_proj.lora_A.weight (outside exclude_mod"),
        ({"exclude_modules": r".*\.1\.self_attn\..*"}, "layers.1.self_attn.q_proj.lora_B.weight (outside exclude_mod"),
    ],
)
def test_tensors_that_the_config_keeps_out_are_refused_by_name(
    fields: dict[str, Any], said: str, adapter: Path, base: Callable[[str], Path]
) -> None:
    edit_json(adapter / CONFIG, **fields)
    with pytest.raises(KeyMismatch) as caught:
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    assert any(said in key for key in caught.value.extra)
    edit_json(adapter / CONFIG, layers_to_transform=[0, 1, 2], layers_pattern="layers", exclude_modules=["o_proj"])
    AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)


def test_layers_that_the_config_names_must_be_there(adapter: Path, base: Callable[[str], Path]) -> None:
    edit_json(adapter / CONFIG, layers_to_transform=[1])
    edited(adapter, lambda t: [t.pop(key) for key in list(t) if ".layers.1." not in key])
    model = AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    assert {name.split(".")[2] for name, _ in model.named_parameters() if "lora_" in name} == {"1"}
    edit_json(adapter / CONFIG, layers_to_transform=[1, 2])
    with pytest.raises(KeyMismatch) as caught:
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    assert all(".layers.2." in key for key in caught.value.missing)


def edited(adapter: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    edit(tensors)
    save_file(tensors, adapter / WEIGHTS)


# With the prefix that PEFT writes; without it PEFT would warn, and leave B at zero.
STEM = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "said", "edit"),
    [
        ("missing", f"{STEM}.lora_B.weight", lambda t: t.pop(f"{STEM}.lora_B.weight")),
        ("missing", f"{STEM}.lora_A.weight", lambda t: [t.pop(f"{STEM}.lora_{side}.weight") for side in "AB"]),
        ("missing", "lora_A.weight", dict.clear),
        ("extra", "layers.9.", lambda t: t.update({f"{STEM}.lora_A.weight".replace("1", "9"): torch.ones(3, 80)})),
        ("extra", "q_proj.bias", lambda t: t.update({f"{STEM}.bias": torch.ones(3)})),
        ("extra", "lora_magnitude", lambda t: t.update({f"{STEM}.lora_magnitude_vector": torch.ones(3)})),
        ("extra", "model.layers.1", lambda t: t.update({f"{STEM[17:]}.lora_A.weight": torch.ones(3, 80)})),
        ("mismatched", STEM, lambda t: t.update({f"{STEM}.lora_A.weight": torch.ones(4, 80)})),
        ("mismatched", STEM, lambda t: t.update({f"{STEM}.lora_A.weight": torch.ones(3, 79)})),
        ("mismatched", STEM, lambda t: t.update({f"{STEM}.lora_B.weight": torch.ones(3, 96)})),
        ("mismatched", "with 2 adapters", lambda t: t.update({f"{STEM}.base_layer.lora_A.weight": torch.ones(3, 80)})),
    ],
)
def test_tensors_that_do_not_fit_are_listed(
    kind: str, said: str, edit: Any, adapter: Path, base: Callable[[str], Path]
) -> None:
    edited(adapter, edit)
    with pytest.raises(KeyMismatch) as caught:
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    found = vars(caught.value)[kind]
    assert found
    assert said in found[0]
    assert all(not vars(caught.value)[other] for other in ("missing", "extra", "mismatched") if other != kind)


@pytest.mark.parametrize(
    "key", ["lm_head.lora_A.weight", "model.embed_tokens.lora_embedding_A", "model.embed_tokens.base_layer.weight"]
)
def test_adapters_on_head_and_embedding_are_refused(key: str, adapter: Path, base: Callable[[str], Path]) -> None:
    edited(adapter, lambda tensors: tensors.update({f"base_model.model.{key}": torch.ones(3, 80)}))
    with pytest.raises(UnsupportedAdapter, match=r"takes no adapter here") as caught:
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    assert "merge_and_unload" in str(caught.value)


def test_peft_made_adapters_on_the_head_are_refused(base: Callable[[str], Path], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_made("qwen3", tmp_path, target_modules=["q_proj", "lm_head"])
    with pytest.raises(BestiaryError, match="lm_head"):
        AutoDecoder.from_pretrained(base("qwen3"), lora=tmp_path)


@pytest.mark.parametrize("version", ["0.18.1", "0.18.0.dev0", None])
def test_expert_adapters_from_before_the_swap_are_refused(
    version: str | None, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Before peft 0.19 A and B of (E, out, in) experts lay the other way round, which fits where 2·I equals H."""
    peft_made("qwen3_moe", tmp_path, target_modules=[], target_parameters=EXPERTS)
    edit_json(tmp_path / CONFIG, peft_version=version)
    with pytest.raises(UnsupportedConfig, match="peft_version"):
        AutoDecoder.from_pretrained(base("qwen3_moe"), lora=tmp_path)


def test_experts_without_their_names_in_the_config_are_refused(base: Callable[[str], Path], tmp_path: Path) -> None:
    """One pair on the module could be either projection: the config says which, never the shape."""
    peft_made("gpt_oss", tmp_path, target_modules=[], target_parameters=EXPERTS[1:])
    edit_json(tmp_path / CONFIG, target_parameters=EXPERTS)
    with pytest.raises(KeyMismatch, match="1 adapters, target_parameters names 2"):
        AutoDecoder.from_pretrained(base("gpt_oss"), lora=tmp_path)


def test_an_expert_too_few_is_refused(base: Callable[[str], Path], tmp_path: Path) -> None:
    stem = "base_model.model.model.layers.0.mlp.experts.{}.down_proj.lora_{}.weight"
    shapes = {"A": (2, 48), "B": (80, 2)}
    tensors = {stem.format(e, side): torch.ones(shape) for e in range(12) if e != 7 for side, shape in shapes.items()}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["down_proj"]}))
    with pytest.raises(KeyMismatch, match=r"an adapter on model\.layers\.0\.mlp\.experts\.7\.down_proj\.weight"):
        AutoDecoder.from_pretrained(base("qwen3_moe"), lora=tmp_path)


def test_files_that_are_not_there_or_broken(adapter: Path, base: Callable[[str], Path], tmp_path: Path) -> None:
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[:-10])
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointNotFound, match="pickles are never read"):
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(CorruptCheckpoint, match=CONFIG):
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    (adapter / CONFIG).unlink()
    with pytest.raises(CheckpointNotFound, match=f"no {CONFIG}"):
        AutoDecoder.from_pretrained(base("qwen3"), lora=adapter)
    with pytest.raises(CheckpointNotFound, match="is not there"):
        AutoDecoder.from_pretrained(base("qwen3"), lora=tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------- refusals: writing


def test_a_folder_with_content_is_refused_and_nothing_is_left(base: Callable[[str], Path], tmp_path: Path) -> None:
    model, folder = ours(base("qwen3"), lora("q_proj")), tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FolderNotEmpty):
        model.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwriting_leaves_one_kind_of_export(base: Callable[[str], Path], tmp_path: Path) -> None:
    """A stale adapter_config.json would make transformers load the adapter's base in place of the checkpoint."""
    model = ours(base("qwen3"), lora("q_proj"))
    full, names = {"config.json", SINGLE}, lambda: {path.name for path in tmp_path.iterdir()}
    model.save_pretrained(tmp_path, merge=True)
    assert names() >= full
    model.save_pretrained(tmp_path, overwrite=True)
    assert names() == {CONFIG, WEIGHTS}
    model.save_pretrained(tmp_path, merge=True, overwrite=True)
    assert names() >= full
    assert not names() & {CONFIG, WEIGHTS}


def changed(change: str, model: Decoder) -> dict[str, Any]:
    """Make the change, and the options of the save that goes with it."""
    if change == "a base weight trains":
        model.model.norm.weight.requires_grad_(True)
    if change == "the vocabulary grew":
        resize_token_embeddings(model, 1010)
    return {"into": "elsewhere"} if change == "into" else {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("a base weight trains", r"model\.norm\.weight trains beside the adapters"),
        ("the vocabulary grew", "vocab_size is not its checkpoint's"),
        ("into", "into = 'elsewhere'"),
    ],
)
def test_what_an_adapter_folder_would_lose_is_refused(
    change: str, said: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    model = ours(base("qwen3"), lora("q_proj"))
    options = changed(change, model)
    with pytest.raises(UnsupportedAdapter, match=said) as caught:
        model.save_pretrained(tmp_path / "out", **options)
    assert "merge=True" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_changed_config_is_refused(base: Callable[[str], Path], tmp_path: Path) -> None:
    model = ours(base("qwen3"), lora("q_proj"))
    model.config.rms_norm_eps = 0.5
    with pytest.raises(ConfigChanged):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_swapped_layer_that_the_bridge_does_not_know_is_refused(base: Callable[[str], Path], tmp_path: Path) -> None:
    model = ours(base("qwen3"), lora("q_proj"))

    class Gated(torch.nn.Module):
        def __init__(self, mlp: torch.nn.Module) -> None:
            super().__init__()
            self.mlp, self.side = mlp, Linear(80, 80, lora=lora("side")).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mlp(x) + self.side(x)
            return y

    replace_modules(model, "model.layers.1.mlp", lambda name, mlp: Gated(mlp))
    for parameter in model.get_submodule("model.layers.1.mlp").parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UnsupportedAdapter, match=r"model\.layers\.1\.mlp\.side has an adapter and no rule"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_several_tensors_in_transformers_is_refused(
    base: Callable[[str], Path], tmp_path: Path
) -> None:
    """A family whose modules fuse or split what we hold otherwise, and whose bridge states no one-tensor layout."""
    bridge = get_bridge("qwen3_moe")
    apart = [
        replace(rule, layouts={"per_expert": rule.layouts["per_expert"]})
        if isinstance(rule, Rule) and "per_expert" in rule.layouts
        else rule
        for rule in bridge.rules
    ]
    model = ours(base("qwen3_moe"), lora("experts.down_proj"))
    with pytest.raises(UnsupportedAdapter, match=r"experts\.down_proj is not one tensor in transformers' modules"):
        save_adapter(replace(bridge, rules=tuple(apart)), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
