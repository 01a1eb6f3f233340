"""How a line of a page's shell block is checked: run, tried dry, parsed, or looked up (`docs/pages.md` says which)."""

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

from bestiary.tools import cli
from bestiary.verify import cli as verify_cli

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("sft", "dpo", "kto", "reward", "distill", "grpo")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
PARSERS = {
    "self-test": verify_cli.build_self_test_parser,
    "diff": verify_cli.build_diff_parser,
    "new": verify_cli.build_new_parser,
}


def check(line: str) -> None:
    """Fails where a command or a flag does not exist, or where one that is run ends with another code than 0."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables in front
        words = words[1:]
    if not words:
        return
    for launcher in ("torchrun", "accelerate"):
        if words[0] == launcher:
            words = ["bestiary", *words[words.index("bestiary.tools.cli") + 1 :]]
    name, *arguments = words
    kind = KINDS.get(name)
    assert kind is not None, f"a page has the command {name!r}, which no test knows: {line}"
    kind(arguments)


def _bestiary(arguments: list[str]) -> None:
    args = cli.build_parser().parse_args(arguments)  # SystemExit 7 where a flag does not exist
    command = arguments[0]
    if command in RECIPES:
        if arguments != ["sft", "run.yaml"]:
            arguments = [*_without(arguments, "--ray"), *([] if "--dry-run" in arguments else ["--dry-run"])]
        run = Path(args.config).is_file()
    else:
        run = {
            "models": True,
            "doctor": "--no-check" in arguments,
            "data": command == "data" and Path(args.config).is_file() if command == "data" else False,
            "export": command == "export" and Path(args.source).exists() and not Path(args.destination).exists(),
            "plot": command == "plot" and all(Path(one).is_dir() for one in args.runs),
        }.get(command, False)
    if run:
        assert cli.main(arguments) == 0, " ".join(arguments)


def _without(arguments: list[str], option: str) -> list[str]:
    """Without an option and its value."""
    if option not in arguments:
        return arguments
    place = arguments.index(option)
    return arguments[:place] + arguments[place + 2 :]


def _verify_bridge(arguments: list[str]) -> None:
    if arguments[0] in PARSERS:
        PARSERS[arguments[0]]().parse_args(arguments[1:])
    else:
        verify_cli.build_parser().parse_args(arguments)


def _python(arguments: list[str]) -> None:
    assert arguments[0] == "-m", arguments
    module, flags = arguments[1], {word.partition("=")[0] for word in arguments[2:] if word.startswith("--")}
    assert importlib.util.find_spec(module) is not None, module
    if not flags:
        return
    told, before = io.StringIO(), sys.argv
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    finally:
        sys.argv = before
    assert sorted(flag for flag in flags if flag not in told.getvalue()) == [], module


def _make(arguments: list[str]) -> None:
    targets = [word for word in arguments if "=" not in word]
    assert targets
    assert sorted(set(targets) - TARGETS) == []


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for wanted in arguments[1:]:
        named = re.fullmatch(r"(?:bestiary|\.)(?:\[([a-z,]+)\])?", wanted)
        assert named is not None, wanted
        assert sorted(set((named[1] or "").split(",")) - EXTRAS - {""}) == []


def _pytest(arguments: list[str]) -> None:
    text = (ROOT / "verify" / "pytest_plugin.py").read_text(encoding="utf-8")
    assert all(f'"{word.partition("=")[0]}"' in text for word in arguments if word.startswith("--"))


def _ci(arguments: list[str]) -> None:
    assert (ROOT / ".ci" / "run").is_file()


KINDS = {
    "bestiary": _bestiary,
    "verify-bridge": _verify_bridge,
    "python": _python,
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    ".ci/run": _ci,
    "export": lambda arguments: None,
}
