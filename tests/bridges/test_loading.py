"""Loading and saving: every input that must be refused, what is kept, and that nothing is left half-done."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bestiary.bridges import get_bridge, load_decoder
from bestiary.bridges.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    FolderNotEmpty,
    KeyMismatch,
    OfflineError,
    TiedHeadMismatch,
    UnsupportedConfig,
    UnsupportedLoad,
    UnsupportedModelType,
)
from bestiary.bridges.storage import SINGLE
from bestiary.kernels.errors import BestiaryError
from bestiary.models import (
    AutoDecoder,
    Decoder,
    Gemma3,
    GptOss,
    LoRAConfig,
    Qwen3,
    replace_modules,
    resize_token_embeddings,
)
from bestiary.models.errors import InvalidConfig

from .checkpoints import FAMILIES, edit_json, reference_model, reload, tiny_config

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny untied checkpoint of a family, written once."""
    folder = tmp_path_factory.mktemp("saved")

    def of(model_type: str) -> Path:
        if not (folder / model_type).exists():
            reference_model(tiny_config(model_type, tie_word_embeddings=False)).save_pretrained(folder / model_type)
        return folder / model_type

    return of


@pytest.fixture
def checkpoint(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy to damage."""
    return lambda model_type: Path(shutil.copytree(saved(model_type), tmp_path / "checkpoint"))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------- keys


MISMATCHES: dict[str, tuple[str, Callable[[Tensors], object], str, str]] = {
    "a missing tensor": (
        "qwen3",
        lambda t: t.pop(f"{LAYER}.mlp.up_proj.weight"),
        "missing",
        f"{LAYER}.mlp.up_proj.weight",
    ),
    "an extra tensor": ("qwen3", lambda t: t.update(stray=torch.zeros(1)), "extra", "stray"),
    "an extra layer": (
        "qwen3",
        lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}),
        "extra",
        "model.layers.3.mlp.up_proj.weight",
    ),
    "a bias the config denies": (
        "qwen3",
        lambda t: t.update({f"{LAYER}.self_attn.q_proj.bias": torch.zeros(96)}),
        "extra",
        f"{LAYER}.self_attn.q_proj.bias",
    ),
    "a wrong shape": (
        "qwen3",
        lambda t: t.update({f"{LAYER}.mlp.up_proj.weight": torch.zeros(80, 112)}),
        "mismatched",
        f"{LAYER}.mlp.up_proj.weight [80, 112] torch.float32, expected [112, 80] float",
    ),
    "a wrong dtype": (
        "qwen3",
        lambda t: t.update({"model.norm.weight": torch.zeros(80, dtype=torch.int64)}),
        "mismatched",
        "model.norm.weight [80] torch.int64, expected [80] float",
    ),
    "an untied head left out": ("qwen3", lambda t: t.pop("lm_head.weight"), "missing", "lm_head.weight"),
    "the eleventh expert": (
        "qwen3_moe",
        lambda t: t.pop("model.layers.0.mlp.experts.10.up_proj.weight"),
        "missing",
        "model.layers.0.mlp.experts.10.up_proj.weight",
    ),
    "a thirteenth expert": (
        "qwen3_moe",
        lambda t: t.update({"model.layers.0.mlp.experts.12.up_proj.weight": torch.zeros(48, 80)}),
        "extra",
        "model.layers.0.mlp.experts.12.up_proj.weight",
    ),
    "two layouts at once": (
        "qwen3_moe",
        lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(12, 80, 48)}),
        "ambiguous",
        "model.layers.0.mlp.experts.down_proj as per_expert",
    ),
    "experts in a dense layer": (
        "qwen3_moe",
        lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.zeros(12, 80)}),
        "extra",
        "model.layers.1.mlp.gate.weight",
    ),
    "a model under two prefixes": (
        "gemma3_text",
        lambda t: t.update({"language_model.model.embed_tokens.weight": torch.zeros(1003, 80)}),
        "ambiguous",
        "language_model.model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_keys_that_do_not_match_are_listed(checkpoint: Callable[[str], Path], name: str) -> None:
    model_type, change, kind, expected = MISMATCHES[name]
    folder = checkpoint(model_type)
    edit_tensors(folder, change)
    with pytest.raises(KeyMismatch) as caught:
        AutoDecoder.from_pretrained(folder)
    assert expected in getattr(caught.value, kind)
    assert caught.value.exit_code == 2
    assert caught.value.read_from == str(folder)
    assert expected.split(" ")[0] in str(caught.value)


def test_long_lists_are_cut_in_the_message_and_whole_in_the_error(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3_moe")
    edit_json(folder / "config.json", num_local_experts=3)
    with pytest.raises(KeyMismatch) as caught:
        AutoDecoder.from_pretrained(folder)
    assert len(caught.value.extra) == 9 * 3 * 2
    assert len(str(caught.value)) < 2000


# ------------------------------------------------------------------------------------------------- tied heads


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint whose config ties the head and whose file stores it all the same."""
    folder = tmp_path / "tied"
    reference_model(tiny_config("qwen3", tie_word_embeddings=True)).save_pretrained(folder)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    return folder


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_an_equal_head_is_accepted_and_written_once(tied: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = AutoDecoder.from_pretrained(tied, dtype=dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    out = model.save_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in load_file(out / SINGLE)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    reload(out)


def test_a_head_that_differs_in_one_bit_is_refused(tied: Path) -> None:
    edit_tensors(tied, lambda t: t["lm_head.weight"].view(torch.int16)[1002, 79].bitwise_xor_(1))
    with pytest.raises(TiedHeadMismatch, match=r"lm_head\.weight") as caught:
        AutoDecoder.from_pretrained(tied, dtype=torch.float16)
    assert caught.value.exit_code == 2


def test_a_head_of_another_shape_is_a_mismatch(tied: Path) -> None:
    edit_tensors(tied, lambda t: t.update({"lm_head.weight": torch.zeros(1004, 80)}))
    with pytest.raises(KeyMismatch, match=r"lm_head\.weight"):
        AutoDecoder.from_pretrained(tied)


# ------------------------------------------------------------------------------------------------- MXFP4


def pack(tensors: Tensors, *, scale: int = 120) -> None:
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        experts, width, hidden = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.ones(experts, hidden, width // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, hidden, width // 32), scale, dtype=torch.uint8)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "packed"
    reference_model(tiny_config("gpt_oss", intermediate_size=64)).save_pretrained(folder)
    edit_tensors(folder, pack)
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return folder


def test_one_projection_may_be_packed_alone(packed: Path) -> None:
    model = AutoDecoder.from_pretrained(packed)
    assert model.dtype is torch.bfloat16
    assert model.get_parameter("model.layers.0.mlp.experts.down_proj").unique().tolist() == [0.0, 0.5 * 2.0**-7]


def test_blocks_without_the_config_that_announces_them(packed: Path) -> None:
    edit_json(packed / "config.json", quantization_config=None)
    with pytest.raises(UnsupportedConfig, match="holds MXFP4") as caught:
        AutoDecoder.from_pretrained(packed)
    assert caught.value.field == "quantization_config.quant_method"


def test_the_config_without_the_blocks_it_announces(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("gpt_oss")
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedConfig, match=r"holds no \*_blocks"):
        AutoDecoder.from_pretrained(folder)


@pytest.mark.parametrize("expert", [0, 7])
def test_zeroed_scales_of_one_expert(packed: Path, monkeypatch: pytest.MonkeyPatch, expert: int) -> None:
    monkeypatch.setattr("bestiary.bridges.loading._CHUNK", 1)  # an expert at a time
    name = f"{LAYER}.mlp.experts.down_proj_scales"
    edit_tensors(packed, lambda t: t[name][expert].zero_())
    with pytest.raises(CorruptCheckpoint, match=f"{name}: every MXFP4 scale is 0 of expert {expert}") as caught:
        AutoDecoder.from_pretrained(packed)
    assert caught.value.read_from == str(packed / SINGLE)


def test_scales_of_another_grid(packed: Path) -> None:
    name = f"{LAYER}.mlp.experts.down_proj_scales"
    edit_tensors(packed, lambda t: t.update({name: t[name].mT.contiguous()}))
    with pytest.raises(KeyMismatch, match=name):
        AutoDecoder.from_pretrained(packed)


# ------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize(
    "src", ["", " ", "./nowhere", "/nowhere/at/all", "no_such_folder", Path("org/name"), "x/y.gguf"]
)
def test_a_path_that_leads_nowhere(src: str | Path) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        AutoDecoder.from_pretrained(src)
    assert caught.value.exit_code == 7


def test_a_hub_id_offline_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OfflineError, match=r"bestiary-tests/absent") as caught:
        AutoDecoder.from_pretrained("bestiary-tests/absent")
    assert "HF_HUB_OFFLINE" in str(caught.value.remedy)
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("src", ["bad name/with spaces", "-bad/id"])
def test_an_id_that_no_hub_has(src: str) -> None:
    with pytest.raises(CheckpointNotFound, match="not on the hub"):
        AutoDecoder.from_pretrained(src)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (None, CheckpointNotFound, "no config"),
        ("{", CorruptCheckpoint, "is no JSON"),
        ("[]", CorruptCheckpoint, "no JSON object"),
        ('{"a": ' + "[" * 100_000, CorruptCheckpoint, "nested too deeply"),
        ("{}", UnsupportedModelType, "states no model_type"),
        ('{"model_type": 3}', UnsupportedModelType, "model_type = 3"),
        ('{"model_type": "llamantis"}', UnsupportedModelType, "'llamantis' has no bridge"),
    ],
    ids=["absent", "half", "list", "deep", "empty", "number", "unknown"],
)
def test_a_config_that_is_none(tmp_path: Path, content: str | None, error: type[BestiaryError], said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=said):
        AutoDecoder.from_pretrained(tmp_path)


def test_a_family_class_refuses_another_family(saved: Callable[[str], Path]) -> None:
    assert isinstance(Qwen3.from_pretrained(saved("qwen3")), Qwen3)
    assert isinstance(Decoder.from_pretrained(saved("gemma3_text")), Gemma3)
    with pytest.raises(UnsupportedModelType, match="served by Qwen3, not by GptOss"):
        GptOss.from_pretrained(saved("qwen3"))


def test_a_subclass_gets_itself(saved: Callable[[str], Path]) -> None:
    class Mine(Qwen3):
        pass

    assert type(Mine.from_pretrained(saved("qwen3"))) is Mine


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "onnx"},
        {"mesh": object()},
        {"dtype": torch.int8},
        {"dtype": "int8"},
        {"dtype": 16},
        {"device": "toaster"},
        {"device": "cuda:99"},
        {"lora": {"r": 2}},
    ],
    ids=lambda options: next(
        f"{name}={type(value).__name__}" if name == "mesh" else f"{name}={value}" for name, value in options.items()
    ),
)
def test_options_that_nothing_can_be_built_from_are_refused(
    saved: Callable[[str], Path], options: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedLoad, match=next(iter(options))):
        load_decoder(saved("qwen3"), **options)


# ------------------------------------------------------------------------------------------------- what is built


@pytest.mark.parametrize("model_type", FAMILIES)
def test_another_dtype_is_one_rounding_away(saved: Callable[[str], Path], model_type: str) -> None:
    stored = AutoDecoder.from_pretrained(saved(model_type))
    for dtype in (torch.float64, torch.float16):
        cast = AutoDecoder.from_pretrained(saved(model_type), dtype=dtype)
        assert all(torch.equal(a.to(dtype), b) for a, b in zip(stored.parameters(), cast.parameters(), strict=True))


@pytest.mark.parametrize("name", ["float32", "torch.float32", "auto"])
def test_a_dtype_by_its_name(saved: Callable[[str], Path], name: str) -> None:
    model = load_decoder(saved("qwen3"), dtype=name)
    assert model.dtype is (torch.bfloat16 if name == "auto" else torch.float32)


def test_without_a_stated_dtype_the_stored_one_holds(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    edit_json(folder / "config.json", dtype=None)
    assert AutoDecoder.from_pretrained(folder).dtype is torch.bfloat16


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_does_not_depend_on_its_file(checkpoint: Callable[[str], Path], model_type: str) -> None:
    folder = checkpoint(model_type)
    before = (folder / SINGLE).read_bytes()
    model = AutoDecoder.from_pretrained(folder)
    values = [parameter.clone() for parameter in model.parameters()]
    with (folder / SINGLE).open("r+b") as file:
        file.write(b"\0" * len(before))
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    (folder / SINGLE).write_bytes(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (folder / SINGLE).read_bytes() == before


def test_loading_leaves_nothing_uninitialised_and_the_model_in_eval_mode(saved: Callable[[str], Path]) -> None:
    model = AutoDecoder.from_pretrained(saved("gpt_oss"))
    assert not model.training
    assert not any(p.is_meta or p.isnan().any() for p in model.parameters())
    assert model.name_or_path == str(saved("gpt_oss"))


def test_adapters_start_neutral_and_the_same_everywhere(saved: Callable[[str], Path]) -> None:
    lora = LoRAConfig(r=3, alpha=6.0, targets=("q_proj", "experts.gate_up_proj"))
    torch.manual_seed(5)
    model = AutoDecoder.from_pretrained(saved("qwen3_moe"), lora=lora)
    torch.manual_seed(5)
    again = AutoDecoder.from_pretrained(saved("qwen3_moe"), lora=lora)
    base = AutoDecoder.from_pretrained(saved("qwen3_moe"))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    for name, parameter in trainable.items():
        assert bool(parameter.any()) == name.endswith("lora_A")
        assert torch.equal(parameter, again.get_parameter(name))
    streamed = dict(model.named_hf_tensors())
    assert all(torch.equal(tensor, streamed[name]) for name, tensor in base.named_hf_tensors())
    with pytest.raises(InvalidConfig, match="matches no linear layer"):
        AutoDecoder.from_pretrained(saved("qwen3"), lora=LoRAConfig(r=2, alpha=2.0, targets=("nothing",)))


def test_merged_tensors_leave_the_base_alone(saved: Callable[[str], Path], tmp_path: Path) -> None:
    lora = LoRAConfig(r=3, alpha=6.0, targets=("q_proj", "experts.*"))
    model = AutoDecoder.from_pretrained(saved("qwen3_moe"), lora=lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    merged, base = dict(model.named_hf_tensors()), dict(model.named_hf_tensors(merge_lora=False))
    expert = "model.layers.2.mlp.experts.11.up_proj.weight"
    low, high = (before[f"model.layers.2.mlp.experts.gate_up_proj_lora_{side}"][11].to(torch.float32) for side in "AB")
    delta = (high[48:] @ low) * 2.0
    assert torch.equal(merged[expert], (base[expert].to(torch.float32) + delta).to(torch.bfloat16))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    stored = load_file(model.save_pretrained(tmp_path / "out", merge=True) / SINGLE)
    assert all(torch.equal(stored[name], tensor) for name, tensor in merged.items())


# ------------------------------------------------------------------------------------------------- saving


def test_a_folder_with_content_is_refused_and_left_as_it_was(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoDecoder.from_pretrained(saved("qwen3"))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FolderNotEmpty):
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    model.save_pretrained(tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt", "config.json", SINGLE}


def test_ids_of_the_checkpoint_reach_the_export_unread(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    edit_json(folder / "config.json", eos_token_id=42)
    edit_json(folder / "generation_config.json", temperature=0.6, do_sample=True)
    out = AutoDecoder.from_pretrained(folder).save_pretrained(tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 42
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6


def test_splicing_refuses_an_original_of_another_shape_or_dtype(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoDecoder.from_pretrained(saved("gemma3_text"))
    with pytest.raises(UnsupportedLoad, match=r"torch\.float32 in the model"):
        AutoDecoder.from_pretrained(saved("gemma3_text"), dtype=torch.float32).save_pretrained(
            tmp_path / "out", into=saved("gemma3_text")
        )
    other = shutil.copytree(saved("gemma3_text"), tmp_path / "other")
    edit_json(other / "config.json", sliding_window=9)
    with pytest.raises(UnsupportedLoad, match="sliding_window = 9"):
        model.save_pretrained(tmp_path / "out", into=other)
    with pytest.raises(FolderNotEmpty, match="the original itself"):
        model.save_pretrained(other, into=other, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_model_exports_its_new_size(tmp_path: Path, tied: bool) -> None:
    reference_model(tiny_config("gemma3_text", tie_word_embeddings=tied)).save_pretrained(tmp_path / "hf")
    model = AutoDecoder.from_pretrained(tmp_path / "hf")
    resize_token_embeddings(model, 1010)
    again = reload(model.save_pretrained(tmp_path / "out"))
    assert again.config.vocab_size == 1010
    assert again.get_input_embeddings().weight.shape == (1010, 80)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_model_that_is_not_its_config_is_not_exported(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoDecoder.from_pretrained(saved("qwen3"))
    replace_modules(model, "model.layers.1.mlp", lambda name, old: torch.nn.Linear(80, 80))
    with pytest.raises(KeyMismatch) as caught:
        model.save_pretrained(tmp_path / "out")
    assert "model.layers.1.mlp.weight" in caught.value.extra
    assert "model.layers.1.mlp.up_proj.weight" in caught.value.missing
    assert list(tmp_path.iterdir()) == []


def test_a_head_untied_behind_the_configs_back_is_not_exported(tied: Path, tmp_path: Path) -> None:
    model = AutoDecoder.from_pretrained(tied)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(KeyMismatch, match=r"lm_head\.weight"):
        model.save_pretrained(tmp_path / "out")


def test_a_fresh_model_exports(tmp_path: Path) -> None:
    config = get_bridge("gpt_oss").parse(tiny_config("gpt_oss").to_dict()).decoder
    model = GptOss(config, dtype=torch.float32)
    again = reload(model.save_pretrained(tmp_path / "out"))
    assert torch.equal(again.model.layers[0].self_attn.sinks, model.get_parameter("model.layers.0.self_attn.sinks"))


@pytest.mark.slow
def test_loading_and_saving_import_no_transformers(saved: Callable[[str], Path], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "from bestiary.models import AutoDecoder\n"
        f"AutoDecoder.from_pretrained({str(saved('qwen3_moe'))!r}).save_pretrained({str(tmp_path / 'out')!r})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert load_file(tmp_path / "out" / SINGLE).keys() == load_file(saved("qwen3_moe") / SINGLE).keys()
