"""The command: help at once, exit codes of usage, JSON that is nothing but JSON."""

import json
import os
import subprocess
import sys

import pytest

from bestiary.verify.cli import build_parser, main
from bestiary.verify.verdict import WORDS, Exit, Report


def test_help_shows_examples_and_imports_no_torch():
    code = "import sys, bestiary.verify.cli as c\ntry: c.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for text in ("verify-bridge qwen3", "self-test", "exit codes", "--only", "--tighten", "--seed"):
        assert text in done.stdout


def test_help_names_the_self_test_in_its_usage_and_every_exit_code():
    shown = build_parser().format_help()
    assert "verify-bridge self-test [options] [FAMILY …]" in shown.partition("Does our")[0]
    codes = shown.partition("exit codes")[2]
    assert all(f"{int(code)} {WORDS[code]}"[:9] in codes for code in Exit)


TWICE = """
import os, sys
from bestiary.verify.cli import main
closed = os.dup(1)
first = main(sys.argv[1:])
os.dup2(closed, 1)
sys.exit(first or main([*sys.argv[1:], "--json", "-"]))
"""
"""The command with text for people, then with JSON; the interpreter's end, which flushes stdout, is the command's."""


@pytest.mark.slow
def test_a_reader_that_closes_stdout_changes_no_exit_code():
    """The read end is closed before anything is written, as after `| head` has had enough."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", TWICE, "qwen3", "--level", "V0", "--quiet"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 7),
        (["qwen3", "--nonsense"], 7),
        (["qwen3", "--level", "V9"], 7),
        (["qwen3", "--tighten", "V2=1"], 7),
        (["qwen3", "--level", "V2", "--only", "layer99"], 7),
        (["qwen3", "--config", "not-there.json"], 7),
        (["./not-there"], 7),
        (["frobnicator"], 4),
    ],
)
def test_wrong_usage_ends_in_its_code_and_one_message(arguments, code, capsys):
    try:
        found = main([*arguments, "--quiet"] if arguments else arguments)
    except SystemExit as end:
        found = end.code
    assert found == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert 0 < len(shown.err.splitlines()) <= 40
    assert "Traceback" not in shown.err


def test_json_to_stdout_is_one_document(capsys):
    assert main(["qwen3", "--level", "V0", "--json", "-", "--quiet"]) == 0
    report = Report.model_validate_json(capsys.readouterr().out)
    assert report.verdicts[0].family == "qwen3"
    assert report.verdicts[0].levels[0].id == "V0"


@pytest.mark.slow
def test_several_families_share_one_report_and_one_line_each(tmp_path, capsys):
    target = tmp_path / "out.json"
    assert main(["qwen3", "gemma3", "--level", "V0", "--json", str(target), "--quiet"]) == 0
    document = json.loads(target.read_text())
    assert document["schema"] == "bestiary.verdict/1"
    assert [verdict["family"] for verdict in document["verdicts"]] == ["qwen3", "gemma3"]
    assert [verdict["model_type"] for verdict in document["verdicts"]] == ["qwen3", "gemma3_text"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "exit 0"


@pytest.mark.slow
def test_a_failure_is_shown_with_the_command_that_repeats_it(capsys):
    arguments = ["qwen3", "--level", "V2", "--tighten", "V2=1e-18", "--quiet"]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert any(line.strip().startswith("again") and "verify-bridge qwen3" in line for line in lines)
    assert lines[-1].startswith("exit 1")
