"""The `bestiary` command: help at once, exit codes, JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bestiary.models import LoRAConfig, Qwen3
from bestiary.tools.cli import build_parser, main


def _tiny_qwen3(**changes: object) -> Qwen3:
    config = Qwen3.sizes["0.6b"].with_(
        vocab_size=101, hidden_size=40, intermediate_size=56, num_hidden_layers=2, layer_types=(), **changes
    )
    model = Qwen3(config)
    model.init_weights(0)
    return model


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers without torch."""
    code = (
        "import sys\n"
        "from bestiary.tools.cli import build_parser, main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bestiary export" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["export"],
        ["models", "--nonsense"],
        ["sft", "run.yaml", "--ray", "8", "streams"],
        ["sft", "run.yaml", "--wings=8"],
        ["export", "a", "b", "--dtype", "int3"],
    ],
)
def test_wrong_usage_exits_7(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is told from a verdict: argparse's own code 2 means keys here."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 7
    assert "error:" in capsys.readouterr().err


def test_changes_of_a_run_may_stand_before_and_behind_options() -> None:
    """`bestiary sft run.yaml --ray 8 data.streams=8` is how people write it."""
    args = build_parser().parse_args(["sft", "run.yaml", "optim.lr=1", "--ray", "8", "data.streams=8", "out=x"])
    assert (args.changes, args.ray) == (["optim.lr=1", "data.streams=8", "out=x"], 8)


@pytest.mark.slow
def test_models_lists_official_parameter_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on stdout stands alone, and the counts are those of the published checkpoints."""
    assert main(["models", "--json", "-"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["schema"] == "bestiary.models/1"
    counts = {(row["model_type"], row["size"].lower()): row["parameters"] for row in payload["models"]}
    assert counts[("qwen3", "0.6b")] == 596_049_920
    assert counts[("gemma3_text", "270m")] == 268_098_176
    assert {model_type for model_type, _ in counts} >= {"qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"}


def test_unknown_family_names_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON file carries the error too."""
    report = tmp_path / "models.json"
    assert main(["models", "--family", "gpt2", "--json", str(report)]) == 7
    assert "Qwen3" in capsys.readouterr().err
    payload = json.loads(report.read_text())
    assert payload["exit_code"] == 7
    assert payload["error"]["type"] == "NoSuchFamily"


def test_export_of_a_missing_checkpoint_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typed error, its exit code, and no destination folder."""
    code = main(["export", str(tmp_path / "absent"), str(tmp_path / "out")])
    assert code == 7
    assert "remedy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_converts_the_dtype_and_keeps_a_full_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exported values are the source's, rounded; a second run needs --overwrite and changes nothing without it."""
    source, target = tmp_path / "source", tmp_path / "target"
    model = _tiny_qwen3()
    model.save_pretrained(source)
    argv = ["export", str(source), str(target), "--dtype", "bfloat16"]
    assert main([*argv, "--json", str(tmp_path / "export.json")]) == 0
    assert json.loads((tmp_path / "export.json").read_text())["model_type"] == "qwen3"
    exported = load_file(target / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], model.model.norm.weight.detach().bfloat16())

    before = (target / "model.safetensors").read_bytes()
    assert main(argv) == 7
    assert "FolderNotEmpty" in capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == before
    assert main([*argv, "--overwrite"]) == 0


def test_export_merges_an_adapter_into_its_base(tmp_path: Path) -> None:
    """SRC may be a PEFT folder that names its base: merged weights differ from the base where the adapter acts."""
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    _tiny_qwen3().save_pretrained(base)
    model = Qwen3.from_pretrained(base, lora=LoRAConfig(r=2, alpha=4.0, targets=("q_proj",)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.fill_(0.5)
    model.save_pretrained(adapter)
    assert main(["export", str(adapter), str(merged), "--merge"]) == 0
    was, now = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert was.keys() == now.keys()
    assert {name for name in was if not torch.equal(was[name], now[name])} == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)
    }
