"""Ports that cheat: each is turned away with exit code 6, by the guard that is meant for it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bestiary.verify.levels as levels
from bestiary.bridges import get_bridge
from bestiary.models import Decoder
from bestiary.tools.cli import main
from bestiary.tools.port import judge
from bestiary.tools.port.check import _expected
from bestiary.tools.port.create import create_plugin
from bestiary.tools.port.fresh import fresh_configs
from bestiary.tools.port.guard import Cheating, file_findings, fingerprints, source_findings
from bestiary.tools.port.judge import constant_output
from bestiary.tools.port.snapshot import Seen, replaced, take
from bestiary.tools.port.state import Port, find
from bestiary.verify import gates
from bestiary.verify.planted.patching import override
from bestiary.verify.reference import Reference
from bestiary.verify.run import run
from bestiary.verify.skeleton import analyse
from bestiary.verify.tiny import tiny_configs
from bestiary.verify.verdict import Verdict, report
from tests.verify.verdicts import level, verdict

COMPLETE = Path(__file__).with_name("cwm_bridge.py")
ROOT = Path(__file__).resolve().parents[2]

DELEGATES = """
class Cwm(Decoder):
    def forward(self, input_ids, **kwargs):
        from transformers import CwmForCausalLM
        return CwmForCausalLM(self.config)(input_ids, **kwargs)
"""

REMEMBERS = """
ANSWERS = {}


class Cwm(Decoder):
    def forward(self, input_ids, **kwargs):
        key = tuple(input_ids.flatten().tolist())
        if key not in ANSWERS:
            ANSWERS[key] = super().forward(input_ids, **kwargs)
        return ANSWERS[key]
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A port of CWM with every decision taken; tests change copies alone."""
    folder = tmp_path_factory.mktemp("honest") / "cwm"
    port = create_plugin(analyse("cwm", sweep=False), folder)
    shutil.copy(COMPLETE, port.site / port.package / "bridge.py")
    return folder


@pytest.fixture
def port(honest: Path, tmp_path: Path) -> Port:
    """A copy, started now: what the working tree is in this moment is what the port may not change."""
    shutil.copytree(honest, tmp_path / "port")
    port = replace(find("cwm", str(tmp_path / "port")), hashes=fingerprints())
    port.write()
    return port


def _append(port: Port, name: str, text: str) -> None:
    path = port.site / port.package / name
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def _check(port: Port, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of `bestiary port check` and its message."""
    code = main(["port", "check", "cwm", "--plugin", str(port.folder)])
    return code, capsys.readouterr().err


@pytest.mark.slow
def test_an_honest_port_breaks_no_rule(port: Port) -> None:
    assert file_findings(port) == []


def test_a_port_that_delegates_to_transformers(port: Port, capsys: pytest.CaptureFixture[str]) -> None:
    _append(port, "model.py", DELEGATES)
    code, message = _check(port, capsys)
    assert code == 6
    assert "imports transformers.CwmForCausalLM" in message


@pytest.mark.slow
def test_a_port_with_edited_gates(port: Port, tmp_path: Path) -> None:
    """bestiary with another threshold, in front of the installed one."""
    package = tmp_path / "site" / "bestiary"
    package.mkdir(parents=True)
    for name in ("kernels", "models", "bridges", "training", "tools"):
        (package / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "verify", package / "verify", ignore=shutil.ignore_patterns("__pycache__"))
    file = package / "verify" / "gates.py"
    text = file.read_text()
    assert '"V2": Gate(1e-10)' in text
    file.write_text(text.replace('"V2": Gate(1e-10)', '"V2": Gate(1e-1)'))
    command = [sys.executable, "-m", "bestiary.tools.cli", "port", "check", "cwm", "--plugin", str(port.folder)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 6, done.stderr
    assert "gates is not what it was" in done.stderr


def test_a_port_that_skips_a_level(port: Port, capsys: pytest.CaptureFixture[str]) -> None:
    _append(
        port,
        "__init__.py",
        "import bestiary.verify.levels as all_of\n"
        'all_of.REGISTRY = tuple(spec for spec in all_of.REGISTRY if spec.id != "V3")\n',
    )
    code, message = _check(port, capsys)
    assert code == 6
    assert "imports bestiary.verify.levels" in message


@pytest.mark.slow
def test_a_port_that_hard_codes_its_output(port: Port, capsys: pytest.CaptureFixture[str]) -> None:
    """No import and no name gives it away: the same tokens have the same logits under other weights."""
    _append(port, "model.py", REMEMBERS)
    assert file_findings(port) == []
    code, message = _check(port, capsys)
    assert code == 6
    assert "the output is hard-coded" in message


def test_a_port_with_a_table_of_answers(port: Port) -> None:
    (port.site / port.package / "answers.pt").write_bytes(b"\0")
    assert file_findings(port) == [f"src/{port.package}/answers.pt is no Python file of {port.package}"]


def test_a_port_that_runs_code_at_start_up(port: Port) -> None:
    (port.site / "sitecustomize.py").write_text("")
    assert file_findings(port) == [f"src/sitecustomize.py is no Python file of {port.package}"]


@pytest.mark.parametrize(
    ("source", "fine"),
    [
        ("import torch\nfrom bestiary.models.config import Norm\nfrom p.model import M\nx = torch.nn.Linear", True),
        ("from transformers.models.llama import modeling_llama", False),
        ("import importlib", False),
        ("def f():\n    import bestiary.verify", False),
        ("from bestiary import verify", False),
        ("from bestiary.bridges.qwen3 import RULES", True),
        ("from bestiary.bridges.hf_fallback import load_fallback", False),
        ("__import__('transformers')", False),
        ("import torch\ntorch.load('x')", False),
        ("import typing\ntyping.sys", False),
    ],
)
def test_what_a_port_may_say(source: str, fine: bool) -> None:
    assert (list(source_findings(source, "a.py", "p")) == []) is fine


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return take()


def test_nothing_is_replaced_by_itself(seen: list[Seen]) -> None:
    assert len(seen) > 1000
    assert replaced(seen) == []


def test_what_is_replaced_in_memory_is_named(seen: list[Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "REGISTRY", levels.REGISTRY[:3])
    monkeypatch.setattr(gates.Gate, "holds", lambda self, figure: True)
    assert replaced(seen) == [
        "bestiary.verify.gates.Gate.holds was replaced in memory",
        "bestiary.verify.levels.REGISTRY was replaced in memory",
    ]


def test_code_that_is_exchanged_inside_a_function_is_named(seen: list[Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates.Gates.tightened, "__code__", gates.Gates.__getitem__.__code__)
    assert replaced(seen) == ["bestiary.verify.gates.Gates.tightened was replaced in memory"]


def test_a_verdict_without_a_level_is_not_the_one_that_was_asked_for(port: Port) -> None:
    all_of = [level(id=spec.id) for spec in levels.REGISTRY]
    right = {"family": "cwm", "model_type": "cwm", "reference_class": "CwmForCausalLM", "levels": all_of}
    assert _expected(report([verdict(**right)]), port, 7).seed == 7
    for change in ({"levels": all_of[:3] + all_of[4:]}, {"scope": "partial"}, {"official": False}, {"seed": 8}):
        with pytest.raises(Cheating):
            _expected(report([verdict(**{**right, **change})]), port, 7)


def test_an_honest_family_depends_on_its_weights_and_tokens() -> None:
    bridge = get_bridge("qwen3")
    assert constant_output(bridge, tiny_configs(bridge.reference)["base"], 3) == []


@pytest.mark.slow
@pytest.mark.parametrize(("by_heart", "found"), [(True, 1), (False, 0)])
def test_answers_learnt_by_heart_are_told_from_answers_that_are_always_wrong(
    monkeypatch: pytest.MonkeyPatch, by_heart: bool, found: int
) -> None:
    """The cheat knows the weights that the loop's seed draws for the known configs, and is right with those alone."""
    bridge, seed, table = get_bridge("qwen3"), 5, "model.embed_tokens.weight"
    base = tiny_configs(bridge.reference)["base"]
    drawn = (judge.OFFICIAL_SEED, judge.OFFICIAL_SEED + 1) if by_heart else ()
    known = {float(Reference(bridge.reference, base, one).state()[table][0, 0]) for one in drawn}

    def look_up(model: Decoder) -> None:
        if float(model.get_parameter(table).detach()[0, 0]) not in known:
            normed = model.model.norm.forward
            override(model.model.norm, lambda x: 1.5 * normed(x))

    def cheating(model_type: str, levels: str, one: int) -> Verdict:
        return run(model_type, levels, one, cases={"base": base}, mutate_ours=lambda side: side.model(look_up))

    monkeypatch.setattr(judge, "run", cheating)
    told = judge.learnt_by_heart("qwen3", cheating("qwen3", "V2", seed), seed)
    assert len(told) == found
    assert all("passes with seed 0 and fails on the same configs with seed 5" in one for one in told)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_fresh_configs_differ_from_the_known_ones_and_build(family: str) -> None:
    bridge = get_bridge(family)
    known, made = tiny_configs(bridge.reference), fresh_configs(bridge.reference, 5)
    assert made.keys() == known.keys()
    assert made["base"] != known["base"]
    assert made["base"] != fresh_configs(bridge.reference, 6)["base"]
    assert made == fresh_configs(bridge.reference, 5)
    for raw in made.values():
        bridge.parse(raw)
    assert json.dumps(made)
