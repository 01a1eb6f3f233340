"""The `bestiary` command: help at once, exit codes, JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bestiary.tools.cli import main


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers without torch."""
    code = (
        "import sys\n"
        "from bestiary.tools.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bestiary export" in done.stdout


@pytest.mark.parametrize("argv", [[], ["export"], ["models", "--nonsense"], ["export", "a", "b", "--dtype", "int3"]])
def test_wrong_usage_exits_7(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is told from a verdict: argparse's own code 2 means keys here."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 7
    assert "error:" in capsys.readouterr().err


def test_models_lists_official_parameter_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on stdout stands alone, and the counts are those of the published checkpoints."""
    assert main(["models", "--json", "-"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["schema"] == "bestiary.models/1"
    counts = {(row["model_type"], row["size"].lower()): row["parameters"] for row in payload["models"]}
    assert counts[("qwen3", "0.6b")] == 596_049_920
    assert counts[("gemma3_text", "270m")] == 268_098_176
    assert {model_type for model_type, _ in counts} == {"qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"}


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
