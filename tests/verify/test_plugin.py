"""The pytest plugin: one test a level, and nothing but a pass is a pass.

The sessions below, each in a folder of its own, share one process, which imports torch and transformers once.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TARGET = "--verify-bridge=qwen3"
LIGHT = "import sys\n\ndef test_light(): assert not {'torch', 'pydantic'} & set(sys.modules)\n"
OWN = "def test_own_V0(): pass\n"
FIXTURE = """
def test_good(verify_bridge):
    assert [level.id for level in verify_bridge("qwen3", level="V0").levels] == ["V0"]

def test_bad(verify_bridge):
    verify_bridge("qwen3", level="V2", only=["base/logits"], tighten=["V2=1e-18"])
"""
DIVERGENCE = """
from bestiary.models.layers.norm import RMSNorm
right = RMSNorm.forward
RMSNorm.forward = lambda self, x: right(self, x) * 1.001
"""

# name: options, and files by their name. The first must find a fresh process, the last leaves a wrong norm in it.
SESSIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "light": ([], {"test_light.py": LIGHT}),
    "listed": ([TARGET, "--collect-only", "-q"], {}),
    "unknown target": (["--verify-bridge=frobnicator"], {}),
    "unknown level": ([TARGET, "--verify-bridge-level=V77"], {}),
    "chosen": ([TARGET, "--verify-bridge-level=V0..V1", "-k", "V0", "-v"], {"test_port.py": OWN}),
    "fixture": ([], {"test_fixture.py": FIXTURE}),
    "divergence": ([TARGET, "--verify-bridge-level=V0,V2"], {"conftest.py": DIVERGENCE}),
}
RUNNER = """
import contextlib, json, os, pathlib, sys
import pytest
for name, options in json.load(sys.stdin).items():
    os.chdir(pathlib.Path(sys.argv[1], name))
    with open("stdout", "w") as out, open("stderr", "w") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = pytest.main(["-p", "no:cacheprovider", "--rootdir", ".", *options])
    pathlib.Path("code").write_text(str(int(code)))
"""


@dataclass(frozen=True)
class Session:
    """What one session of pytest printed, and its exit code."""

    code: int
    out: str
    err: str

    def shows(self, *patterns: str) -> bool:
        """Whether lines of stdout match the patterns, in their order."""
        lines = iter(self.out.splitlines())
        return all(any(fnmatchcase(line, pattern) for line in lines) for pattern in patterns)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """All of them, run once."""
    folder = tmp_path_factory.mktemp("sessions")
    for name, (_, files) in SESSIONS.items():
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(text)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(folder)],
        input=json.dumps({name: options for name, (options, _) in SESSIONS.items()}),
        env={**env, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]

    def read(path: Path) -> Session:
        return Session(int((path / "code").read_text()), (path / "stdout").read_text(), (path / "stderr").read_text())

    return {name: read(folder / name) for name in SESSIONS}


def test_a_family_is_one_test_a_level(sessions):
    session = sessions["listed"]
    names = [line for line in session.out.splitlines() if line.startswith("verify-bridge[qwen3]::")]
    assert names[0] == "verify-bridge[qwen3]::V0-keys"
    assert len(names) == len(set(names)) >= 7
    assert session.code == pytest.ExitCode.OK


def test_levels_are_chosen_by_option_and_by_keyword_beside_the_tests_of_a_port(sessions):
    session = sessions["chosen"]
    assert session.shows("*test_own_V0 PASSED*", "*V0-keys PASSED*", "*2 passed, 1 deselected*"), session.out
    assert session.code == pytest.ExitCode.OK


def test_a_divergence_fails_its_level_and_shows_the_verdict_without_a_traceback(sessions):
    session = sessions["divergence"]
    lines = ["*first divergence*", "*verify-bridge qwen3 --level V2*", "exit 1  numeric*", "*1 failed, 1 passed*"]
    assert session.shows(*lines), session.out
    assert "runtest" not in session.out


@pytest.mark.parametrize(("what", "error"), [("target", "UnsupportedModelType"), ("level", "BadUsage")])
def test_an_unknown_target_or_level_is_wrong_usage_and_no_empty_success(sessions, what, error):
    session = sessions[f"unknown {what}"]
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert error in session.err


def test_the_fixture_returns_the_verdict_and_fails_the_test_unless_it_passes(sessions):
    session = sessions["fixture"]
    assert session.shows("*NotVerified*", "*exit 1  numeric*", "*1 failed, 1 passed*"), session.out
    assert re.search(r"FAILED .*::test_bad", session.out)


def test_without_the_option_nothing_heavy_is_imported(sessions):
    assert sessions["light"].shows("*1 passed*"), sessions["light"].out
