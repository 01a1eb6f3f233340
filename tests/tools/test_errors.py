"""Errors: one table of all classes with cause and remedy, and a test that expects each of them."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bestiary.bridges.undecided import undecided
from bestiary.kernels.errors import BestiaryError
from bestiary.tools.cli import build_parser
from bestiary.tools.error_page import PAGE, ErrorClass, called, error_classes, page, sources
from bestiary.training.plot import read_runs

ROOT = Path(__file__).resolve().parents[2]
CLASSES = error_classes(ROOT)


def _run(*argv: str) -> None:
    """A command of `bestiary`, whose error is not caught."""
    args = build_parser().parse_args(argv)
    args.run(args, print) if args.command == "port" else args.run(args)


def _engine_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.training.rl.rollout import Sampling
    from bestiary.training.rl.vllm_engine import VllmEngine

    engine = object.__new__(VllmEngine)  # one that broke off a call; starting vLLM takes half a minute
    engine.context, engine._vocab, engine._version = 64, 101, 0
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(has_unfinished_requests=lambda: True))
    engine.generate([[1, 2, 3]], Sampling(max_tokens=4))


def _kill_list_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.tools.port import check

    judged = {"unlisted": ["Q1_x"], "unkept": [], "proposal": ["Q*"]}
    monkeypatch.setattr(check, "file_findings", lambda port: [])
    monkeypatch.setattr(
        check, "_Process", lambda *_: SimpleNamespace(answer=lambda: judged, folder=tmp_path, close=int)
    )
    passed = SimpleNamespace(verdicts=[], to_json=lambda indent: "{}")
    monkeypatch.setattr(check, "read_report", lambda file: passed)
    monkeypatch.setattr(check, "_expected", lambda *_: SimpleNamespace(hashes={}, exit_code=0))
    monkeypatch.setattr(check, "card", lambda *_: "")
    check.check(_port(tmp_path), say=lambda line: None)


def _port_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.tools.port import check

    monkeypatch.setattr(check, "JUDGE", "bestiary.tools.port.no_judge")
    monkeypatch.setattr(check, "file_findings", lambda port: [])
    check.check(_port(tmp_path), say=lambda line: None)


def _port(folder: Path) -> object:
    from bestiary.tools.port.state import Port

    return Port("cwm", "x:CwmForCausalLM", "plugin", "", {}, folder)


def _missing_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.models import Qwen3

    with_another_name = Qwen3.sizes["0.6b"].with_(model_type="qwen33")
    Qwen3(with_another_name, device="meta").save_pretrained(tmp_path)


def _not_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.verify.skeleton import analyse

    analyse("llama", raw={"model_type": "llama", "hidden_size": "wide"})


def _out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.training.control import named_failures

    with named_failures("2.0 GiB", 60.0):
        raise MemoryError


def _package_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.tools import demo_tuning

    monkeypatch.setattr(demo_tuning, "find_spec", lambda name: None)
    demo_tuning.check_packages()


def _rich_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.tools import data_commands

    monkeypatch.setitem(sys.modules, "rich.console", None)
    data_commands._console()


def _no_score_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bestiary.bridges import get_bridge
    from bestiary.bridges.score import score_class

    score_class(get_bridge("granite"))


def _not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("model: {src: base}\n")
    _run("submit", str(tmp_path / "run.yaml"))


# Classes that no other test expects by `pytest.raises`.
RAISERS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "EngineFailed": _engine_failed,
    "KillListWrong": _kill_list_wrong,
    "MissingBridge": _missing_bridge,
    "NoPort": lambda tmp_path, _: _run("port", "status", "cwm", "--plugin", str(tmp_path)),
    "NoScoreClass": _no_score_class,
    "NotSubmitted": _not_submitted,
    "NotTiny": _not_tiny,
    "NothingToPlot": lambda tmp_path, _: read_runs([tmp_path]),
    "OpenDecision": lambda *_: undecided("norm.cast", "before or after the weight"),
    "OutOfMemory": _out_of_memory,
    "PackageMissing": _package_missing,
    "PortExists": lambda tmp_path, _: _run("port", "new", "qwen3", "--no-sweep", "--plugin", str(tmp_path / "port")),
    "PortFailed": _port_failed,
    "RichMissing": _rich_missing,
}


@pytest.mark.parametrize("name", RAISERS)
def test_it_is_raised_with_a_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BestiaryError) as caught:
        RAISERS[name](tmp_path, monkeypatch)
    assert type(caught.value).__name__ == name
    assert caught.value.remedy
    (known,) = [one for one in CLASSES if one.name == name]
    assert caught.value.exit_code == known.exit_code


_CALLED = re.compile(r"(?<!class )\b([A-Z]\w+)\(")


def _names(node: ast.AST) -> set[str]:
    """Names and attributes below a node."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def expected_by_tests(folder: Path) -> set[str]:
    """Names in `pytest.raises(…)` of the tests, and in the decorators of a test that gives it an argument."""
    found = set[str]()
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for test in ast.walk(ast.parse(text)) if "raises" in text else ():
            if not isinstance(test, ast.FunctionDef):
                continue
            calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
            asked = [call.args[0] for call in calls if called(call) == "raises" and call.args]
            names = set[str]().union(*map(_names, asked))
            found |= names
            if names & {argument.arg for argument in test.args.args}:
                found |= set[str]().union(*map(_names, test.decorator_list))
    return found


def _made(root: Path) -> set[str]:
    """Names that the package calls: an error that is nowhere made cannot be met."""
    return {name for path in sources(root) for name in _CALLED.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.slow
def test_every_error_of_the_package_is_expected_by_a_test() -> None:
    met = expected_by_tests(ROOT / "tests") | set(RAISERS)
    made = _made(ROOT)
    assert sorted({one.name for one in CLASSES if one.name in made and one.name not in met}) == []


def test_every_class_states_its_cause_and_a_remedy() -> None:
    assert [f"{one.module}.{one.name}" for one in CLASSES if not one.cause or not one.remedy] == [], (
        "a paragraph of the docstring begins with `Remedy:`"
    )


def test_the_page_of_errors_is_current() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(CLASSES), "make readme"


def test_the_page_knows_every_class_that_python_knows() -> None:
    """Reading the source finds what importing does."""
    import bestiary.training.errors
    import bestiary.verify.api  # noqa: F401

    def below(kind: type[BestiaryError]) -> set[str]:
        return {kind.__qualname__ for kind in kind.__subclasses__()}.union(*map(below, kind.__subclasses__()))

    listed = {one.name for one in CLASSES}
    assert sorted(name for name in below(BestiaryError) - listed if "<locals>" not in name) == []


def test_a_class_shows_its_own_exit_code_or_its_base_s() -> None:
    codes = {one.name: one.exit_code for one in CLASSES}
    assert (codes["MissingShard"], codes["CorruptCheckpoint"]) == (2, 2)
    assert (codes["OpenDecision"], codes["StepFailed"], codes["InvalidRun"]) == (4, 1, 7)
    assert isinstance(CLASSES[0], ErrorClass)
