"""`bestiary port`: what `new` writes, what `status` says, and a port replayed from a clean state to its acceptance."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bestiary.bridges import registered_bridges
from bestiary.models.config import DecoderConfig
from bestiary.tools.cli import build_parser, main
from bestiary.tools.port import create
from bestiary.tools.port.guard import allowed, changed, fingerprints
from bestiary.tools.port.judge import proposal
from bestiary.tools.port.state import find
from bestiary.tools.port.status import open_decisions
from bestiary.verify.cli import build_new_parser
from bestiary.verify.cli import main as verify_main
from bestiary.verify.planted import CATALOGUE
from bestiary.verify.skeleton import KNOWN, Analysis, NoReference, analyse, reference_of
from bestiary.verify.skeleton_text import bridge_source

BIN = Path(sys.executable).parent
COMPLETE = Path(__file__).with_name("cwm_bridge.py")


ROOT = Path(__file__).resolve().parents[2]
FAMILY = "cwm"  # a Llama with windows that no bridge here serves


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyse(FAMILY, sweep=False)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A port of CWM as `new` leaves it; tests change copies alone."""
    folder = tmp_path_factory.mktemp("port") / "cwm"
    assert main(["port", "new", "cwm", "--plugin", str(folder), "--json", str(folder.parent / "new.json")]) == 0
    return folder


def _run(folder: Path, command: str, site: Path, timeout: int = 1500) -> subprocess.CompletedProcess[str]:
    """A command line in `folder`, with `site` in front of what is installed."""
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f"{os.pathsep}{folder / 'src'}"
    return subprocess.run(
        [str(BIN / program), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.slow
def test_new_classifies_fields_and_names_keys_and_the_nearest_family(started: Path) -> None:
    told = json.loads((started.parent / "new.json").read_text())["analysis"]
    kinds = {row["name"]: (row["kind"], row["ours"]) for row in told["fields"]}
    assert kinds["rms_norm_eps"] == ("live", "norm.eps")
    assert kinds["mlp_bias"] == ("shape", "mlp_bias")
    assert kinds["attention_dropout"] == ("train", "attention.dropout")
    assert kinds["pretraining_tp"] == ("dead", "")
    shapes = {row["pattern"]: row["shape"] for row in told["keys"]}
    assert shapes["model.layers.*.self_attn.k_proj.weight"] == ["K·D", "H"]
    assert shapes["model.layers.*.mlp.down_proj.bias"] == ["H"]  # behind a flag that is off by default
    near = told["nearest"]
    assert near["family"] in registered_bridges()
    assert near["similarity"] > 0.7  # Llama, Mistral and their kin


def test_the_skeleton_is_refused_by_the_name_of_its_first_open_decision(started: Path) -> None:
    port = find("cwm", str(started))
    decisions = open_decisions(port)
    assert decisions[0] == "attention.scale"
    verdict = json.loads((started / "verdict.json").read_text())["verdicts"][0]
    assert verdict["exit_code"] != 0
    assert "attention.scale" in verdict["error"]
    assert not re.search("TODO|FIXME", (port.site / port.package / "bridge.py").read_text())


def test_the_files_of_a_new_port_pass_the_linter(started: Path) -> None:
    done = subprocess.run(
        [BIN / "ruff", "check", "--isolated", "--select", "E4,E7,E9,F,W", started], capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()


def test_status_tells_the_next_command(started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", "status", "cwm", "--plugin", str(started), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "bestiary.port_status/1"
    assert told["accepted"] is False
    assert told["last"]["current"] is True
    assert told["next"].startswith("verify-bridge cwm")


@pytest.mark.slow
def test_new_refuses_a_family_that_is_there_and_a_folder_that_is_full(
    started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["port", "new", "qwen3", "--no-sweep", "--plugin", str(tmp_path / "x")]) == 7
    assert not (tmp_path / "x").exists()
    assert main(["port", "new", "cwm", "--no-sweep", "--plugin", str(started)]) == 7
    assert capsys.readouterr().err.count("PortExists") == 2


def test_an_unknown_model_type_names_close_ones() -> None:
    with pytest.raises(NoReference, match="llama"):
        reference_of("lama")


def test_a_folder_without_a_port_is_a_typed_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", "status", "cwm", "--plugin", str(tmp_path)]) == 7
    (tmp_path / "port.json").write_text('{"schema": "bestiary.port_state/1"}')
    assert main(["port", "check", "cwm", "--plugin", str(tmp_path)]) == 7
    assert capsys.readouterr().err.count("NoPort") == 2


@pytest.mark.parametrize("action", ["new", "check", "status"])
def test_help_shows_an_example(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["port", action, "--help"])
    assert stop.value.code == 0
    assert f"bestiary port {action} llama" in capsys.readouterr().out


def test_commands_of_agents_md_are_commands() -> None:
    """The replay below runs them all; here the spelling of the page is parsed."""
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    section = text.partition("## A new architecture")[2].partition("\n## ")[0]
    commands = [
        shlex.split(line.partition("#")[0]) for line in section.splitlines() if re.match("bestiary|verify-b", line)
    ]
    assert len(commands) == 4
    for program, *arguments in commands:
        if program == "bestiary":
            assert build_parser().parse_args(arguments).model_type == "MODEL_TYPE"
        else:
            assert arguments[0] == "new"
            assert build_new_parser().parse_args(arguments[1:]).model_type == "MODEL_TYPE"


def test_verify_bridge_new_prints_the_table_and_the_skeleton(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_main(["new", FAMILY, "--no-sweep", "--json", str(tmp_path / "new.json")]) == 0
    printed = capsys.readouterr().out
    assert "nearest family: " in printed
    assert 'undecided("norm.cast"' in printed
    assert json.loads((tmp_path / "new.json").read_text())["model_type"] == FAMILY


def test_usual_homes_are_fields_of_our_config() -> None:
    """The table of the skeleton points at nothing that was renamed."""
    import typing

    for path in KNOWN.values():
        owner: typing.Any = DecoderConfig
        for name in path.split("."):
            hint = typing.get_type_hints(owner)[name]
            owner = next((part for part in typing.get_args(hint) if part is not type(None)), hint)


def test_keys_without_a_rule_are_an_open_decision() -> None:
    """A family with fused projections: its keys are not ours, and the skeleton says so."""
    source = bridge_source(analyse("phi3", sweep=False), "bestiary.models.phi3")
    compile(source, "bridge.py", "exec")
    assert 'undecided("rules"' in source


def test_a_kill_list_proposal_matches_what_it_is_made_of_and_no_more() -> None:
    from fnmatch import fnmatchcase

    ids = [bug.id for bug in CATALOGUE]
    wanted = set(ids[::3])
    globs = proposal(wanted)
    assert {one for one in ids if any(fnmatchcase(one, glob) for glob in globs)} == wanted
    assert len(proposal(set(ids))) < len(ids) / 2


# ------------------------------------------------------------------------------------------------ inside a checkout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with as much of the tree as a port touches."""
    for folder in ("bridges", "models", "verify"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "verify" / "gates.py").write_text("GATE = 1e-10\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\n\n[project.entry-points."bestiary.bridges"]\nauto = "a:B"\n\n[tool.x]\ny = 1\n'
    )
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, env=environment, check=True)
    return tmp_path


def test_a_port_in_the_tree_adds_two_files_and_an_entry_point(repository: Path, analysis: Analysis) -> None:
    port = create.create_in_tree(analysis, repository)
    paths = changed(repository, port.start)
    assert {"bridges/cwm.py", "models/cwm.py", "pyproject.toml", "ports/cwm/PORT.md"} <= set(paths)
    assert all(allowed(port, path) for path in paths)
    entries = (repository / "pyproject.toml").read_text().split("\n\n")[1].splitlines()
    assert entries[-1] == 'cwm = "bestiary.bridges.cwm:BRIDGE"'
    assert find("cwm", None, repository) == port


def test_a_port_in_the_tree_starts_from_a_commit(repository: Path, analysis: Analysis) -> None:
    (repository / "verify" / "gates.py").write_text("GATE = 1\n")
    with pytest.raises(create.NoCheckout, match=r"verify/gates\.py"):
        create.create_in_tree(analysis, repository)


# ------------------------------------------------------------------------------------------------ replay


def _commands(folder: Path) -> list[str]:
    """Command lines of PORT.md's code blocks."""
    blocks = re.findall(r"```\n(.*?)```", (folder / "PORT.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(("bestiary ", "verify-bridge "))]


# Of the planted bugs and the rewrites that concern a Llama with windows some more than a self-test must have: that all
# of them are found is a property of the verifier, and the families' self-tests hold it.
FEWER = {
    "planted/__init__.py": "CATALOGUE = tuple(bug for bug in CATALOGUE if bug.level != 'V3')[::2]",
    "benign.py": "REWRITES = tuple(one for one in REWRITES if not one.levels.startswith('K'))[:14]",
}


def _own_copy(site: Path) -> Path:
    """bestiary as it is now: a port is turned away when a file of it changes while the port is judged."""
    for name in ("kernels", "models", "bridges", "verify", "training", "tools"):
        shutil.copytree(ROOT / name, site / "bestiary" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, line in FEWER.items():
        with (site / "bestiary" / "verify" / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    return site


# One process for all commands: each has the arguments, the exit code and the output that it has by itself.
COMMANDS = """
import contextlib, io, json, shlex, sys
from bestiary.tools.cli import main
from bestiary.verify.cli import main as verify

told = []
for command in sys.argv[1:]:
    program, *arguments = shlex.split(command)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = {"bestiary": main, "verify-bridge": verify}[program](arguments)
    told.append([int(code), out.getvalue()])
print(json.dumps(told))
"""
PROBE = """
from bestiary.bridges import get_bridge
from bestiary.tools.port.judge import proposal
from bestiary.verify.planted import CATALOGUE
from bestiary.verify.tiny import tiny_configs

bridge = get_bridge("cwm")
configs = [bridge.parse(raw).decoder for raw in tiny_configs(bridge.reference).values()]
print(*proposal({bug.id for bug in CATALOGUE if bug.concerns(bridge, configs)}))
"""


def _replay(folder: Path, site: Path, *commands: str) -> list[list[Any]]:
    """Exit code and output of each of these command lines, one after the other in `folder`."""
    program = folder.parent / "commands.py"
    program.write_text(COMMANDS, encoding="utf-8")
    done = _run(folder, shlex.join(["python", str(program), *commands]), site)
    assert done.returncode == 0, done.stderr
    told: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_completed_skeleton_is_accepted_and_loads_by_its_entry_point(tmp_path: Path) -> None:
    """From `new` to `check` by the commands of PORT.md, each of which is run."""
    site, folder = _own_copy(tmp_path / "site"), tmp_path / "cwm"
    new = _run(tmp_path, "bestiary port new cwm --no-sweep --plugin cwm", site)
    assert new.returncode == 0, new.stderr
    bridge = folder / "src" / "bestiary_cwm" / "bridge.py"
    bridge.write_text(COMPLETE.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    found = _run(folder, f"python {tmp_path / 'probe.py'}", site)  # it loads by its entry point
    assert found.returncode == 0, found.stderr
    globs = ", ".join(f'"{glob}"' for glob in found.stdout.split())
    text = bridge.read_text(encoding="utf-8")
    bridge.write_text(text.replace("KILL_LIST: tuple[str, ...] = ()", f"KILL_LIST = ({globs},)"), encoding="utf-8")

    layer, whole, status, check = _commands(folder)
    before = _replay(folder, site, layer, f"{whole} --level V0", status, f"{check} --json check.json", status)
    assert [code for code, _ in before] == [0] * 5, before
    assert "accepted: no" in before[2][1]
    assert json.loads((folder / "check.json").read_text())["accepted"] is True
    assert "Planted bugs" in (folder / "CARD.md").read_text()
    acceptance = json.loads((folder / "acceptance.json").read_text())["verdicts"][0]
    assert (acceptance["scope"], acceptance["seed"] != 0) == ("full", True)
    assert "accepted: yes" in before[4][1]
    with (folder / "src" / "bestiary_cwm" / "model.py").open("a", encoding="utf-8") as file:
        file.write("\n# changed after the acceptance\n")
    assert "accepted: no" in _run(folder, status, site).stdout


def test_fingerprints_are_stable_and_leave_out_a_ports_own_files() -> None:
    assert fingerprints() == fingerprints()
    assert fingerprints("qwen3")["bridges"] != fingerprints()["bridges"]
    assert fingerprints("qwen3")["verify"] == fingerprints()["verify"]
