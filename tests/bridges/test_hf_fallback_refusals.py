"""What the fallback backend refuses to load: unknown types, code of strangers, broken files, foreign options."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from bestiary.bridges import get_bridge
from bestiary.bridges.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyMismatch,
    RemoteCodeRefused,
    UnsupportedLoad,
    UnsupportedModelType,
)
from bestiary.bridges.storage import SINGLE
from bestiary.models import AutoDecoder, Decoder

from .fallbacks import checkpoint, expected_log_probs, next_tokens, wrapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny checkpoint of a family, written once."""
    return partial(checkpoint, tmp_path_factory.mktemp("fallback"))


def test_an_unknown_type_is_offered_the_fallback(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Where transformers has the family; else what would be needed, and never silently."""
    for load in (AutoDecoder.from_pretrained, Decoder.from_pretrained):
        with pytest.raises(UnsupportedModelType, match=r"'gpt_neox' has no bridge") as caught:
            load(folder("gpt_neox"))
        assert 'AutoDecoder.from_pretrained(…, backend="hf")' in str(caught.value.remedy)
    with pytest.raises(UnsupportedModelType) as caught:
        get_bridge("llamantis")
    assert "has no causal language model of this type" in str(caught.value.remedy)
    (tmp_path / "config.json").write_text('{"model_type": "llamantis"}')
    with pytest.raises(UnsupportedModelType, match="'llamantis' has no causal language model in transformers"):
        AutoDecoder.from_pretrained(tmp_path, backend="hf")


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OddConfig(PretrainedConfig):
    model_type = "odd_model"

    def __init__(self, vocab_size=11, hidden_size=8, **more):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**more)


class OddForCausalLM(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, use_cache=None, **more):
        return CausalLMOutputWithPast(logits=self.head(self.embed(input_ids)))
"""


def test_code_from_a_checkpoint_runs_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by default and on the native backend; with consent it loads, trains from its own logits, and travels."""
    source, ids = tmp_path / "odd", torch.tensor([[1, 2, 3]])
    source.mkdir()
    (source / "odd.py").write_text(REMOTE)
    names = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    fields = {"model_type": "odd_model", "vocab_size": 11, "hidden_size": 8, "dtype": "float32", "auto_map": names}
    (source / "config.json").write_text(json.dumps({**fields, "architectures": ["OddForCausalLM"]}))
    weights = {name: torch.randn(11, 8) for name in ("embed.weight", "head.weight")}
    save_file(weights, source / SINGLE, metadata={"format": "pt"})
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(RemoteCodeRefused, match="own modelling code") as caught:
        AutoDecoder.from_pretrained(source, backend="hf")
    assert caught.value.exit_code == 4
    with pytest.raises(UnsupportedLoad, match="never runs code"):
        AutoDecoder.from_pretrained(source, trust_remote_code=True)
    assert not (tmp_path / "modules").exists()
    model = wrapped(source, trust_remote_code=True)
    expected = weights["embed.weight"][ids] @ weights["head.weight"].T
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.log_probs, expected_log_probs(expected, next_tokens(ids)))
    output.loss.backward()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(wrapped(tmp_path / "saved", trust_remote_code=True)(ids).logits, model(ids).logits)


def test_options_and_files_that_cannot_be_used(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Each with its own error, before or after the weights are read."""
    load = partial(AutoDecoder.from_pretrained, backend="hf")
    with pytest.raises(UnsupportedLoad, match=r"backend = 'hf' wraps transformers' model, which is no Decoder"):
        Decoder.from_pretrained(folder("phi"), backend="hf")
    for option in ({"mesh": object()}, {"dtype": "int8"}, {"device": "toaster"}, {"lora": {"r": 2}}):
        with pytest.raises(UnsupportedLoad, match=next(iter(option))):
            load(folder("phi"), **option)
    with pytest.raises(CheckpointNotFound):
        load(tmp_path / "nowhere")
    config = (folder("phi") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    torch.save({}, tmp_path / "pytorch_model.bin")  # a pickle, which is not read
    with pytest.raises(CheckpointNotFound, match="no weights"):
        load(tmp_path)
    content = (folder("phi") / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptCheckpoint):
        load(tmp_path)
    (tmp_path / SINGLE).write_bytes(content)
    fields = json.loads(config)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))
    with pytest.raises(KeyMismatch, match=r"missing .*layers\.2") as caught:
        load(tmp_path)
    assert caught.value.exit_code == 2
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 1}))
    assert "are not used by transformers' model" in wrapped(tmp_path).fallback_report()
