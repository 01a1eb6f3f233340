"""transformers.Trainer: ours moves as transformers' model does, its checkpoints resume bit for bit and are exports."""

import shutil

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, TrainingArguments

from bestiary.models import AutoDecoder, LoRAConfig
from bestiary.training.errors import CheckpointRefused
from bestiary.training.integrations import transformers_trainer
from bestiary.training.integrations.example import InvalidRow
from bestiary.training.integrations.script import dataset
from bestiary.training.integrations.transformers_trainer import DecoderTrainer, load_weights

from .pairs import assert_moved_alike, outcome, settings
from .tiny_checkpoint import FAMILIES_HERE, tokenizer, words, write_checkpoint, write_rows

SIZES = (5, 9, 3, 12, 7, 4, 10, 6)  # of documents: micro-batches hold different numbers of targets


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(place / family, family) for family in FAMILIES_HERE}


@pytest.fixture(scope="module")
def rows():
    ids = [tokenizer()(words(size, seed))["input_ids"] for seed, size in enumerate(SIZES)]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


def trained(model, rows, out, accumulate):
    args = TrainingArguments(**settings(out, accumulate))
    return outcome(DecoderTrainer, model, args, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer()))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_updates_are_those_of_transformers_model(folders, rows, tmp_path, family, accumulate):
    """In float64; what is left is what transformers computes in float32 in any case (norms, router)."""
    ours = AutoDecoder.from_pretrained(folders[family], dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float64, experts_implementation="eager")
    assert_moved_alike(
        trained(ours, rows, tmp_path, accumulate),
        trained(theirs, rows, tmp_path, accumulate),
        1e-5,
        logged=("loss", "grad_norm"),
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_our_adapters_are_trained_as_pefts_are(folders, rows, tmp_path, accumulate):
    """The same adapters, ours in our model and PEFT's around transformers'; compared as PEFT writes them."""
    lora = LoRAConfig(r=3, alpha=6, targets=("q_proj", "down_proj"))
    ours = AutoDecoder.from_pretrained(folders["gemma3"], dtype=torch.float64, lora=lora)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    ours.save_pretrained(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(folders["gemma3"], dtype=torch.float64)
    theirs = PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True, autocast_adapter_dtype=False)
    first, second = trained(ours, rows, tmp_path, accumulate), trained(theirs, rows, tmp_path, accumulate)
    assert len(first.moved) == len(second.moved) == len(start)
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        model.save_pretrained(tmp_path / name)
    mine, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert mine.keys() == other.keys() == start.keys()
    for name, before in start.items():
        assert (other[name] - before).norm() > 0, name
        assert (mine[name] - other[name]).norm() <= 1e-5 * (other[name] - before).norm(), name


@pytest.mark.parametrize(("family", "extra"), [("gemma3", ()), ("qwen3_moe", ()), ("gemma3", ("--lora", "3"))])
def test_the_script_resumes_bit_for_bit_and_exports(folders, tmp_path, family, extra):
    """From `checkpoint-2` of 4 steps of AdamW; the end is the same file. transformers and PEFT read it and agree."""
    data = write_rows(tmp_path / "rows.jsonl", [{"text": words(size, seed)} for seed, size in enumerate(SIZES)])
    given = [str(folders[family]), str(data), "--steps", "4", "--save-every", "2", "--batch", "2", "--lr", "1e-2"]
    whole = transformers_trainer.main([*given, *extra, "--out", str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again = transformers_trainer.main([*given, *extra, "--out", str(tmp_path / "again"), "--resume"])
    name = "adapter_model.safetensors" if extra else "model.safetensors"
    assert (whole / name).read_bytes() == (again / name).read_bytes()
    assert (whole / name).read_bytes() != (tmp_path / "whole" / "checkpoint-2" / name).read_bytes()

    theirs = AutoModelForCausalLM.from_pretrained(folders[family] if extra else whole)
    theirs = PeftModel.from_pretrained(theirs, whole) if extra else theirs
    ours = AutoDecoder.from_pretrained(folders[family], lora=whole) if extra else AutoDecoder.from_pretrained(whole)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_best_checkpoint_is_loaded_at_the_end(folders, rows, tmp_path):
    """A rate at which it gets worse: the best is the first."""
    model = AutoDecoder.from_pretrained(folders["gemma3"])
    kept = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = TrainingArguments(**settings(tmp_path, 1) | kept, load_best_model_at_end=True, learning_rate=3.0)
    collator = DataCollatorForSeq2Seq(tokenizer())
    trainer = DecoderTrainer(model, args, collator, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    best = AutoDecoder.from_pretrained(trainer.state.best_model_checkpoint)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    for ours, stored in zip(model.parameters(), best.parameters(), strict=True):
        assert torch.equal(ours, stored)


def test_a_checkpoint_of_another_architecture_is_not_resumed(folders, tmp_path):
    """Trainer's own loading would warn about keys and go on; here nothing is changed."""
    model = AutoDecoder.from_pretrained(folders["gemma3"])
    before = [parameter.clone() for parameter in model.parameters()]
    shorter = model.decoder_config.with_(num_hidden_layers=1, layer_types=model.decoder_config.layer_types[:1])
    type(model)(shorter, dtype=torch.float32).save_pretrained(tmp_path / "shorter")
    with pytest.raises(CheckpointRefused, match=r"model\.layers\.1\S* is absent in the checkpoint"):
        load_weights(model, tmp_path / "shorter")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("content", "said"), [("", "no rows"), ("{\n", "line 1 is no JSON"), (None, "is not a file")])
def test_a_data_file_that_is_none_is_refused(tmp_path, content, said):
    """Before a model is read."""
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRow, match=said):
        dataset(file)
