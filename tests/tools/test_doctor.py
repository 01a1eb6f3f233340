"""`bestiary doctor` on machines that lack something: the right advice each time."""

import json
import os
import socket
import subprocess
import sys

import pytest

from bestiary.tools import doctor
from bestiary.tools.doctor import FEATURES, Check, Diagnosis, present, reachable

BLOCKED = ("triton", "ray", "pyarrow")
# Python takes a None for a module that cannot be found, whoever asks.
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED}))
from bestiary.tools.cli import main
sys.exit(main(["doctor", "--json", "-"]))
"""


@pytest.fixture(scope="module")
def without():
    """The result where triton, ray and pyarrow cannot be imported and the hub's port is closed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = taken.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{closed}", "HF_HUB_OFFLINE": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_what_is_missing_comes_with_the_command_that_installs_it(without):
    features = {feature["name"]: feature for feature in without["features"]}
    for name in ("triton", "ray"):
        assert features[name]["missing"] == [name]
        assert features[name]["command"] == f"pip install 'bestiary[{name}]'"
    assert features["data"]["missing"] == ["pyarrow"]
    assert features["peft"]["missing"] == []
    assert features["peft"]["command"] is None
    assert any("recipes read no data yet: pip install 'bestiary[data]'" in line for line in without["advice"])


def test_without_a_network_the_advice_is_folders(without):
    assert without["hub"]["reachable"] is False
    assert any("give folders in place of hub ids" in line for line in without["advice"])


def test_what_is_left_works(without):
    """Without Triton the self-check verifies and trains, and compiles nothing."""
    assert [(check["name"], check["ok"]) for check in without["checks"]] == [("verify", True), ("train", True)]
    assert without["schema"] == "bestiary.doctor/1"
    assert without["versions"]["torch"].startswith("2.")
    assert without["machine"]["memory_gib"] > 1


@pytest.mark.slow
def test_a_required_package_that_is_not_there_is_the_diagnosis():
    """Not an error of the doctor's own."""
    program = PROGRAM.replace(str(BLOCKED), "('huggingface_hub',)").replace('"-"]', '"-", "--no-check"]')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["huggingface_hub"] == "missing"
    assert "pip install --force-reinstall 'huggingface_hub<3,>=2.4'" in found["advice"][0]
    assert found["checks"] == []


def test_a_hub_that_answers_is_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reachable(f"http://127.0.0.1:{server.getsockname()[1]}")


def diagnosis(**changes):
    machine = {"system": "Linux", "cores": 2, "memory_gib": 8.0, "free_gib": 4.0, "devices": ["cuda:0"], "cxx": "g++"}
    values = {
        "versions": {"torch": "2.13.0"},
        "outside": [],
        "features": [],
        "machine": machine,
        "disk": {"runs": 50.0},
        "hub": {"address": "http://localhost", "reachable": None},
    }
    return Diagnosis(**(values | changes))


def test_a_gpu_without_triton_is_worth_a_line():
    missing = {"name": "triton", "missing": ["triton"], "command": "pip install it"}
    assert doctor._advice(diagnosis(features=[missing])) == [
        "there is a GPU and no Triton, so slower kernels run: pip install it"
    ]


@pytest.mark.parametrize(("compiler", "told"), [("no-such-compiler -O2", 1), (f"{sys.executable} -O2", 0)])
def test_without_a_compiler_the_advice_is_to_install_one(monkeypatch, compiler, told):
    monkeypatch.setenv("CXX", compiler)
    machine = {**doctor._memory(), "devices": []}
    assert len([line for line in doctor._advice(diagnosis(machine=machine)) if "apt-get install g++" in line]) == told


def test_a_system_library_that_is_missing_is_installed_by_its_package(monkeypatch):
    monkeypatch.setattr(doctor, "has_library", lambda _name: False)
    monkeypatch.setattr(doctor, "present", lambda _module: True)
    found = doctor._feature(next(feature for feature in FEATURES if feature.name == "vllm"))
    assert (found["missing"], found["command"]) == (["libnuma.so.1"], "apt-get install libnuma1")


def test_a_failed_check_or_a_missing_requirement_decides_the_exit_code():
    assert diagnosis().exit_code == 0
    assert diagnosis(checks=[Check("train", ok=True), Check("verify")]).exit_code == 1
    assert diagnosis(versions={"torch": "missing"}).exit_code == 7


def test_a_check_that_raises_is_booked(monkeypatch):
    def broken():
        raise OSError("no such library")

    monkeypatch.setattr(doctor, "_verify", broken)
    monkeypatch.setattr(doctor, "_train", lambda: "fine")
    triton = {"name": "triton", "missing": ["triton"]}
    checks = doctor.self_check(diagnosis(features=[triton]))
    assert [(check.name, check.ok, check.found) for check in checks] == [
        ("verify", False, "OSError: no such library"),
        ("train", True, "fine"),
    ]


def test_versions_that_were_not_run_are_told(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: "0.1" if package == "peft" else doctor.version(package))
    monkeypatch.setattr(doctor, "_hub", lambda: {"address": "", "reachable": None})
    (told,) = [line for line in doctor.examine(checks=False).advice if line.startswith("peft 0.1, run with")]
    assert told.endswith("pip install 'peft<0.22,>=0.21'")


def test_every_module_of_a_feature_is_named_as_python_knows_it():
    """In the environment of tests nearly all are installed; a misspelt module would be missing for ever."""
    optional = {"wandb", "mlflow-skinny", "trackio"}
    known = {name: module for feature in FEATURES for name, module in feature.packages.items() if name not in optional}
    assert not [name for name, module in known.items() if doctor.installed(name) and not present(module)]
