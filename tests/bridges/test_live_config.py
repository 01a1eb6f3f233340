"""What was written on a live `model.config`: exported where it changes nothing, else refused before a file appears."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from bestiary.bridges.errors import ConfigChanged, UnsupportedConfig
from bestiary.models import AutoDecoder, Gemma3, resize_token_embeddings

from .checkpoints import FAMILIES, reference_model, reload, tiny_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a family, written once."""
    folder = tmp_path_factory.mktemp("saved")

    def of(model_type: str) -> Path:
        if not (folder / model_type).exists():
            reference_model(tiny_config(model_type)).save_pretrained(folder / model_type)
        return folder / model_type

    return of


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_trainers_write_on_the_config_is_exported(
    saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    model = AutoDecoder.from_pretrained(saved(model_type))
    ids = {"pad_token_id": 7, "bos_token_id": 5, "eos_token_id": [8, 9], "use_cache": False}
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.config.name_or_path = "org/base"
    model.generation_config.max_new_tokens = 11
    out = model.save_pretrained(tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids
    assert written["_name_or_path"] == "org/base"
    assert reload(out).generation_config.max_new_tokens == 11
    again = AutoDecoder.from_pretrained(out)
    assert again.decoder_config == model.decoder_config
    assert again.config.eos_token_id == [8, 9]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_object_of_the_reference_is_exported(
    saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    model = AutoDecoder.from_pretrained(saved(model_type))
    model.config = transformers.AutoConfig.from_pretrained(saved(model_type))
    again = AutoDecoder.from_pretrained(model.save_pretrained(tmp_path / "out"))
    assert again.decoder_config == model.decoder_config


@pytest.mark.parametrize(
    ("model_type", "field", "value", "ours"),
    [
        ("qwen3_moe", "rms_norm_eps", 1e-3, "norm.eps"),
        ("qwen3_moe", "num_hidden_layers", 2, "num_hidden_layers"),
        ("qwen3_moe", "vocab_size", 5, "vocab_size"),
        ("qwen3_moe", "norm_topk_prob", False, "norm_topk_prob"),
        ("qwen3", "attention_bias", True, "attention_bias"),
        ("qwen3", "use_sliding_window", True, "use_sliding_window"),
        ("qwen3", "model_type", "qwen2", "model_type"),
        ("gemma3_text", "num_key_value_heads", 1, "attention.num_kv_heads"),
        ("gemma3_text", "model_type", "gemma3", "model_type"),
        ("gpt_oss", "swiglu_limit", 9.0, "moe.clamp.limit"),
    ],
)
def test_a_changed_architecture_field_is_an_error(
    saved: Callable[[str], Path], tmp_path: Path, model_type: str, field: str, value: Any, ours: str
) -> None:
    model = AutoDecoder.from_pretrained(saved(model_type))
    setattr(model.config, field, value)
    with pytest.raises(ConfigChanged, match=f"says .*{ours} = ") as caught:
        model.save_pretrained(tmp_path / "out")
    assert ours in caught.value.fields
    assert repr(value) in caught.value.what
    assert "Norm(" not in caught.value.what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_causal", False), ("foo", 1), ("attention_dropout", 1.5), ("pad_token_id", 5000), ("hidden_act", "mish")],
)
def test_what_no_loader_would_take_back_is_refused_by_name(
    saved: Callable[[str], Path], tmp_path: Path, field: str, value: Any
) -> None:
    model = AutoDecoder.from_pretrained(saved("qwen3"))
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedConfig, match=rf"^{field} = {value!r}") as caught:
        model.save_pretrained(tmp_path / "out")
    assert caught.value.field == field
    assert caught.value.read_from == "model.config"
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_padding_token_that_a_smaller_vocabulary_lost_is_refused(tmp_path: Path) -> None:
    reference_model(tiny_config("qwen3", pad_token_id=1002)).save_pretrained(tmp_path / "hf")
    model = AutoDecoder.from_pretrained(tmp_path / "hf")
    resize_token_embeddings(model, 1000)
    with pytest.raises(UnsupportedConfig, match=r"^pad_token_id = 1002 is outside the vocabulary of 1000"):
        model.save_pretrained(tmp_path / "out")
    model.config.pad_token_id = 3
    assert AutoDecoder.from_pretrained(model.save_pretrained(tmp_path / "out")).decoder_config.vocab_size == 1000


def test_an_architecture_that_the_family_cannot_state_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    config = AutoDecoder.from_pretrained(saved("gemma3_text")).decoder_config
    odd = config.with_(attention=replace(config.attention, scale=0.3))
    with pytest.raises(UnsupportedConfig, match=r"^attention\.scale = 0\.3 has no place") as caught:
        Gemma3(odd).save_pretrained(tmp_path / "out")
    assert caught.value.field == "attention.scale"
    assert list(tmp_path.iterdir()) == []
    one_rope = Gemma3(config.with_(sliding_rope=None)).save_pretrained(tmp_path / "out")
    assert AutoDecoder.from_pretrained(one_rope).decoder_config.sliding_rope == config.rope
