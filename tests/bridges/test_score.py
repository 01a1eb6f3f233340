"""Reward models: …ForSequenceClassification both ways, fresh heads on causal checkpoints, PEFT folders."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bestiary.bridges import FreshHeadWarning, get_bridge
from bestiary.bridges.errors import ConfigChanged, KeyMismatch, UnsupportedAdapter, UnsupportedConfig, UnsupportedLoad
from bestiary.models import AutoDecoder, Decoder, LoRAConfig, Qwen3
from bestiary.models.config import HeadKind

from .checkpoints import edit_json, reference_model, tiny_config

FAMILIES = ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
PAD = 5


def classifier(model_type: str, labels: int = 1) -> Any:
    """transformers' reward model at toy size, every parameter random."""
    config = tiny_config(model_type, num_labels=labels, pad_token_id=PAD)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Rows of three lengths, padded on the right with the pad token."""
    ids = torch.randint(10, 1000, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:], mask[2, 3:] = 0, 0
    return torch.where(mask == 1, ids, PAD), mask


def scores(model: Any) -> Tensor:
    ids, mask = batch()
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, attention_mask=mask)["logits"]
    return found


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    reference_model(tiny_config("qwen3", pad_token_id=PAD, tie_word_embeddings=False), torch.float32).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    classifier("qwen3").save_pretrained(folder)
    return folder


def fresh(folder: Path, **options: Any) -> Decoder:
    with pytest.warns(FreshHeadWarning, match=r"score\.weight was drawn at random"):
        return AutoDecoder.from_pretrained(folder, head="score", **options)


@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_reward_model_travels_both_ways(model_type: str, labels: int, tmp_path: Path) -> None:
    theirs = classifier(model_type, labels)
    theirs.save_pretrained(tmp_path / "hub")
    ours = AutoDecoder.from_pretrained(tmp_path / "hub")
    assert (ours.decoder_config.head, ours.decoder_config.num_labels) == (HeadKind.SCORE, labels)
    assert torch.allclose(scores(ours), scores(theirs), atol=1e-4)
    ours.save_pretrained(tmp_path / "ours")
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    assert {kind: found for kind, found in info.items() if found} == {}
    assert torch.equal(scores(again), scores(theirs))


def test_the_hub_names_stream_out(reward: Path) -> None:
    names = dict(AutoDecoder.from_pretrained(reward).named_hf_tensors())
    assert names["score.weight"].shape == (1, 80)
    assert "lm_head.weight" not in names


def test_names_of_labels_are_kept(reward: Path, tmp_path: Path) -> None:
    theirs = classifier("qwen3", 2)
    theirs.config.id2label, theirs.config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    theirs.save_pretrained(tmp_path / "hub")
    AutoDecoder.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["id2label"], written["label2id"]) == ({"0": "bad", "1": "good"}, {"bad": 0, "good": 1})


def test_a_causal_checkpoint_gets_a_fresh_head_that_the_seed_decides(causal: Path, tmp_path: Path) -> None:
    models = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        models.append(fresh(causal))
    backbone = AutoDecoder.from_pretrained(causal).model.state_dict()
    assert all(torch.equal(tensor, backbone[name]) for name, tensor in models[0].model.state_dict().items())
    assert torch.equal(models[0].score.weight, models[1].score.weight)
    assert not torch.equal(models[0].score.weight, models[2].score.weight)
    models[0].save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert theirs.config.num_labels == 1
    assert torch.allclose(scores(theirs), scores(models[0]), atol=1e-6)


def test_labels_of_a_causal_config_do_not_become_those_of_the_scores(causal: Path, tmp_path: Path) -> None:
    (tmp_path / "causal").mkdir()
    for file in causal.iterdir():
        (tmp_path / "causal" / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "causal" / "config.json", id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    fresh(tmp_path / "causal").save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["id2label"] == {"0": "LABEL_0"}


def test_a_family_class_takes_the_head_too(causal: Path, reward: Path) -> None:
    with pytest.warns(FreshHeadWarning):
        assert isinstance(Qwen3.from_pretrained(causal, head="score"), Qwen3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FreshHeadWarning)
        assert Qwen3.from_pretrained(reward, head="score").decoder_config.head is HeadKind.SCORE


def test_what_trainers_write_on_the_live_config_is_saved(reward: Path, tmp_path: Path) -> None:
    model = AutoDecoder.from_pretrained(reward)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, PAD)
    model.config.pad_token_id, model.config.architectures = 6, ["Qwen3"]
    model.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["pad_token_id"], written["architectures"]) == (6, ["Qwen3ForSequenceClassification"])
    model.config.num_labels = 3
    with pytest.raises(ConfigChanged, match="num_labels"):
        model.save_pretrained(tmp_path / "other")


def lora_model(causal: Path) -> Decoder:
    model = fresh(causal, lora=LoRAConfig(r=2, alpha=4, targets=("q_proj", "down_proj")))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1)
    return model


def test_lora_and_the_score_head_are_a_peft_folder(causal: Path, tmp_path: Path) -> None:
    import peft

    ours = lora_model(causal)
    ours.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = transformers.AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.allclose(scores(theirs), scores(ours), atol=1e-6)
    theirs.save_pretrained(tmp_path / "peft")
    for folder in ("adapter", "peft"):
        again = AutoDecoder.from_pretrained(causal, lora=tmp_path / folder)
        assert torch.equal(scores(again), scores(ours))
        assert again.score.weight.requires_grad
    ours.save_pretrained(tmp_path / "merged", merge=True)
    assert torch.allclose(scores(AutoDecoder.from_pretrained(tmp_path / "merged")), scores(ours), atol=1e-6)


def test_a_base_that_trains_beside_adapters_and_head_fits_into_no_folder(causal: Path, tmp_path: Path) -> None:
    model = lora_model(causal)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(UnsupportedAdapter, match=r"model\.norm\.weight"):
        model.save_pretrained(tmp_path / "adapter")


def test_an_adapter_with_scores_is_no_language_model(causal: Path, tmp_path: Path) -> None:
    lora_model(causal).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedLoad, match="reward model"):
        AutoDecoder.from_pretrained(causal, lora=tmp_path / "adapter", head="lm")
    edit_json(tmp_path / "adapter" / "adapter_config.json", modules_to_save=["lm_head"])
    with pytest.raises(UnsupportedConfig, match="modules_to_save"):
        AutoDecoder.from_pretrained(causal, lora=tmp_path / "adapter")


def test_heads_that_are_not_there_are_refused(causal: Path, reward: Path) -> None:
    with pytest.raises(UnsupportedLoad, match="no language-model head"):
        AutoDecoder.from_pretrained(reward, head="lm")
    with pytest.raises(UnsupportedLoad, match="lm, score"):
        AutoDecoder.from_pretrained(causal, head="value")  # type: ignore[call-overload]
    with pytest.raises(UnsupportedLoad, match="backend"):
        AutoDecoder.from_pretrained(causal, head="score", backend="hf")


@pytest.mark.parametrize("model_type", ["granite", "olmoe", "cohere2"])
def test_a_family_without_a_class_for_scores_says_so(model_type: str) -> None:
    with pytest.raises(UnsupportedLoad, match="has no ForSequenceClassification"):
        get_bridge(model_type).reference_for(HeadKind.SCORE)


def test_a_stray_head_or_a_missing_score_is_a_key_mismatch(causal: Path, reward: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in causal.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edit_json(folder / "config.json", architectures=["Qwen3ForSequenceClassification"], id2label={"0": "a"})
    with pytest.raises(KeyMismatch) as caught:
        AutoDecoder.from_pretrained(folder)
    assert (caught.value.missing, caught.value.extra) == (("score.weight",), ("lm_head.weight",))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_labels": 4, "id2label": {"0": "a"}}, "num_labels"),
        ({"id2label": {}}, "id2label"),
        ({"id2label": None, "num_labels": "one"}, "num_labels"),
        ({"id2label": ["a"]}, "id2label"),
    ],
)
def test_labels_that_make_no_sense_are_refused(reward: Path, changes: dict[str, Any], field: str) -> None:
    content = json.loads((reward / "config.json").read_text()) | changes
    with pytest.raises(UnsupportedConfig) as caught:
        get_bridge("qwen3").parse({name: value for name, value in content.items() if value is not None})
    assert caught.value.field == field
