"""Hugging Face → ours → exported → Hugging Face: tensors bit-equal, config semantics equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bestiary.bridges import MemorySource, fill, get_bridge
from bestiary.bridges.errors import KeyMismatch
from bestiary.bridges.storage import INDEX, SINGLE, SafetensorsSource
from bestiary.models import AutoDecoder
from bestiary.verify.weights import perturb

from .checkpoints import FAMILIES, edit_json, multimodal_config, reference_model, reload, tiny_config

# Fields that exports spell differently with the same meaning, or that are bookkeeping.
SPELLING = {"_name_or_path", "dtype", "architectures", "decoder_sparse_step", "mlp_only_layers", "transformers_version"}


def semantics(config: Any) -> dict[str, Any]:
    """A transformers config as what it means; which layers route, spelled as a list."""
    fields = {name: value for name, value in config.to_dict().items() if name not in SPELLING}
    if config.model_type == "qwen3_moe":
        layers = range(config.num_hidden_layers)
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        fields["routed"] = [i for i in layers if i not in dense and (i + 1) % step == 0]
    return fields


def assert_same(model: Any, again: Any) -> None:
    first, second = model.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert [name for name in first if first[name].dtype is not second[name].dtype] == []
    assert semantics(again.config) == semantics(model.config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1003, 1024])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bit_equal_through_three_shards(
    tmp_path: Path, model_type: str, tied: bool, vocab: int, dtype: torch.dtype
) -> None:
    model = reference_model(tiny_config(model_type, tie_word_embeddings=tied, vocab_size=vocab), dtype)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(tmp_path / "hf", max_shard_size=size // 3)
    ours = AutoDecoder.from_pretrained(tmp_path / "hf")
    assert ours.dtype is dtype
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    out = ours.save_pretrained(tmp_path / "ours", max_shard_size=size // 3)
    assert len(list(out.glob("model-*.safetensors"))) >= 3
    assert_same(model, reload(out))
    again = AutoDecoder.from_pretrained(out)
    assert again.decoder_config == ours.decoder_config
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_square_model_is_not_mistaken(tmp_path: Path, model_type: str) -> None:
    """hidden = intermediate = 2 × expert width = heads × head_dim: only declared layouts can be right."""
    width = {"qwen3_moe": 48, "gpt_oss": 96}.get(model_type, 96)
    square = {"hidden_size": 96, "intermediate_size": width if model_type == "gpt_oss" else 96}
    square |= {"moe_intermediate_size": 48} if model_type == "qwen3_moe" else {}
    model = reference_model(tiny_config(model_type, **square))
    model.save_pretrained(tmp_path / "hf")
    assert_same(model, reload(AutoDecoder.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "ours")))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_exported_names_and_shapes_are_those_of_the_hub(tmp_path: Path, model_type: str) -> None:
    reference_model(tiny_config(model_type, tie_word_embeddings=False)).save_pretrained(tmp_path / "hf")
    ours = AutoDecoder.from_pretrained(tmp_path / "hf")
    theirs = load_file(tmp_path / "hf" / SINGLE)
    streamed = dict(ours.named_hf_tensors())
    assert {name: t.shape for name, t in streamed.items()} == {name: t.shape for name, t in theirs.items()}
    assert all(torch.equal(streamed[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_stream_of_hub_tensors_fills_another_model(tmp_path: Path, model_type: str) -> None:
    """What is left out is named by its parameter, what is unknown or misshapen by its hub name."""
    reference_model(tiny_config(model_type)).save_pretrained(tmp_path / "hf")
    one, other = AutoDecoder.from_pretrained(tmp_path / "hf"), AutoDecoder.from_pretrained(tmp_path / "hf")
    perturb(one, seed=3)
    assert other.load_hf_tensors(one.named_hf_tensors()) == []
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    left = [pair for pair in one.named_hf_tensors() if pair[0] != "model.norm.weight"]
    assert other.load_hf_tensors(left) == ["model.norm.weight"]
    for name, tensor in (("x.weight", torch.zeros(1)), ("model.norm.weight", torch.zeros(1))):
        with pytest.raises(KeyMismatch, match=name):
            other.load_hf_tensors([(name, tensor)])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_state_dict_of_the_reference_is_a_checkpoint_too(model_type: str) -> None:
    """The modules of transformers 5 hold fused experts; the rules read that layout from memory."""
    config = tiny_config(model_type)
    model = reference_model(config)
    bridge = get_bridge(model_type)
    ours = bridge.decoder(bridge.parse(config.to_dict()).decoder, dtype=torch.bfloat16)
    state = {
        name: t
        for name, t in model.state_dict().items()
        if name != "lm_head.weight" or not ours.config.tie_word_embeddings
    }
    source = MemorySource(state)
    fill(ours, source, bridge.plan_import(ours.decoder_config, source.infos))
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.isfinite(ours(ids).logits).all()
    if model_type == "qwen3_moe":
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A GPT-OSS checkpoint with MXFP4 experts, hidden and expert width multiples of 32 and different."""
    config = tiny_config("gpt_oss", hidden_size=96, intermediate_size=64)
    folder = tmp_path / "packed"
    reference_model(config).save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    generator = torch.Generator().manual_seed(0)
    for layer in range(3):
        for projection, rows, columns in (("gate_up_proj", 128, 96), ("down_proj", 96, 64)):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            del tensors[name]
            grid = (12, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = torch.randint(110, 130, grid, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return folder


def test_mxfp4_becomes_its_exact_bf16_values(packed: Path, tmp_path: Path) -> None:
    stored = load_file(packed / SINGLE)
    out = AutoDecoder.from_pretrained(packed).save_pretrained(tmp_path / "ours")
    again = reload(out)
    assert not hasattr(again.config, "quantization_config")
    for layer in range(3):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(again.get_parameter(name), expected)
    plain = {name: t for name, t in stored.items() if not name.endswith(("_blocks", "_scales"))}
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in plain.items())


def test_mxfp4_in_another_dtype_is_the_same_values(packed: Path) -> None:
    half = AutoDecoder.from_pretrained(packed)
    full = AutoDecoder.from_pretrained(packed, dtype=torch.float32)
    assert all(torch.equal(a.to(torch.float32), b) for a, b in zip(half.parameters(), full.parameters(), strict=True))


MULTIMODAL = {
    "hub": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "": ""},
    "transformers 5": {"model.": "model.language_model.", "": "model."},
}


@pytest.fixture(params=MULTIMODAL)
def multimodal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A text model with a vision tower beside it, under each of the two prefixes."""
    prefixes = MULTIMODAL[request.param]
    model = reference_model(tiny_config("gemma3_text", pad_token_id=0))
    folder = tmp_path / "multimodal"
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    tensors = {prefixes["model."] + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors[f"{prefixes['']}vision_tower.encoder.weight"] = torch.ones(3, 2)
    tensors[f"{prefixes['']}multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(2)
    half = len(tensors) // 2
    names = sorted(tensors)
    for number, part in enumerate((names[:half], names[half:]), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + (i >= half)}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / INDEX).write_text("{}")
    edit_json(folder / INDEX, metadata={}, weight_map=weight_map)
    (folder / SINGLE).unlink()
    text = model.config.to_diff_dict()
    (folder / "config.json").write_text("{}")
    edit_json(
        folder / "config.json",
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=text,
        vision_config={"hidden_size": 16},
        eos_token_id=[1, 106],
        dtype="bfloat16",
    )
    (folder / "tokenizer.json").write_text("kept")
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def test_multimodal_weights_are_exported_as_their_text_model(multimodal: Path, tmp_path: Path) -> None:
    ours = AutoDecoder.from_pretrained(multimodal)
    again = reload(ours.save_pretrained(tmp_path / "text"))
    assert type(again).__name__ == "Gemma3ForCausalLM"
    assert again.config.eos_token_id == [1, 106]
    originals = stored(multimodal)
    name = next(name for name in originals if name.endswith("layers.1.mlp.up_proj.weight"))
    assert torch.equal(again.model.layers[1].mlp.up_proj.weight, originals[name])
    assert len(originals) == len(again.state_dict()) - 1 + 2  # the tied head is not stored; two tensors of the vision


def test_multimodal_weights_are_spliced_into_a_copy(multimodal: Path, tmp_path: Path) -> None:
    ours = AutoDecoder.from_pretrained(multimodal)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    before = stored(multimodal)
    out = ours.save_pretrained(tmp_path / "copy", into=multimodal)
    after = stored(out)
    assert after.keys() == before.keys()
    vision = [name for name in before if "vision_tower" in name or "projector" in name]
    assert [name for name in vision if not torch.equal(after[name], before[name])] == []
    assert [name for name in before if name not in vision and torch.equal(after[name], before[name])] == []
    for name in ("config.json", "tokenizer.json", INDEX):
        assert (out / name).exists()
    assert (out / "config.json").read_text() == (multimodal / "config.json").read_text()
    again = AutoDecoder.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    with SafetensorsSource(out) as source:
        assert len(source.files) == 2


def test_a_real_multimodal_model_keeps_its_vision_and_takes_our_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(multimodal_config()).eval()
    model.save_pretrained(tmp_path / "hf")
    ours = AutoDecoder.from_pretrained(tmp_path / "hf")
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model(input_ids=ids).logits)
        for parameter in ours.parameters():
            parameter.mul_(2)
    out = ours.save_pretrained(tmp_path / "copy", into=tmp_path / "hf")
    again, info = transformers.Gemma3ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert {kind: found for kind, found in info.items() if found} == {}
    for name, tensor in again.state_dict().items():
        text = "language_model" in name or name == "lm_head.weight"
        assert torch.equal(tensor, model.state_dict()[name] * (2 if text else 1)), name
