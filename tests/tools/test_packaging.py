"""What is shipped: the wheel, the entry points, and life beside Hugging Face's `kernels` package."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("models", "kernels", "bridges", "verify", "training", "tools")


def _pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


MODEL_TYPES = _pyproject()["project"]["entry-points"]["bestiary.bridges"].keys() - {"auto"}


def _run(code: str, *, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` with the interpreter of the tests; `env` is added, an empty value removes the name."""
    merged = {name: value for name, value in {**os.environ, **env}.items() if value}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=merged, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the working tree, built in a copy so that the tree stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy(ROOT / name, source / name)
    for portion in PORTIONS:
        shutil.copytree(ROOT / portion, source / portion, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", target, source], capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (path,) = target.glob("bestiary-*.whl")
    return zipfile.ZipFile(path)


def test_what_is_pinned_installs_on_the_python_of_a_long_lived_distribution() -> None:
    """Debian 12 has Python 3.11.2; a pin that wants more makes `make venv` fail there, as a conflict of versions."""
    pins = (ROOT / "tools" / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = {
        found.metadata["Name"]: found.metadata["Requires-Python"] or ""
        for found in importlib.metadata.distributions()
        if f"{canonicalize_name(found.metadata['Name'])}=={found.version}"
        in {line.partition("#")[0].strip().replace("_", "-") for line in pins}
    }
    assert len(wanted) > 50
    assert {name: text for name, text in wanted.items() if not SpecifierSet(text).contains("3.11.2")} == {}


@pytest.mark.slow
def test_wheel_holds_every_module_and_type_marker(wheel: zipfile.ZipFile) -> None:
    """A sub-folder missing from `packages`, or a schema missing from the package data, shows here."""
    shipped = {name for name in wheel.namelist() if name.startswith("bestiary/")}
    expected = {
        f"bestiary/{path.relative_to(ROOT).as_posix()}"
        for portion in PORTIONS
        for path in (ROOT / portion).rglob("*")
        if path.suffix in {".py", ".json", ".css"} or path.name == "py.typed"
    }
    assert {f"bestiary/{portion}/py.typed" for portion in PORTIONS} <= shipped
    assert shipped == expected


def test_wheel_has_no_other_top_level_name(wheel: zipfile.ZipFile) -> None:
    """`import kernels` must stay Hugging Face's; the licence travels with the code."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    version = _pyproject()["project"]["version"]
    assert tops == {"bestiary", f"bestiary-{version}.dist-info"}
    assert f"bestiary-{version}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_installed_entry_points_are_those_of_pyproject() -> None:
    """A stale installation is told from a wrong table."""
    declared = _pyproject()["project"]["entry-points"]["bestiary.bridges"]
    installed = {
        entry.name: entry.value
        for entry in importlib.metadata.distribution("bestiary").entry_points
        if entry.group == "bestiary.bridges"
    }
    assert installed == declared, "pyproject.toml changed after the installation: run make venv"


def _pins(name: str) -> dict[str, str]:
    """Versions of a requirement file; a line that is no exact pin fails."""
    lines = (ROOT / "tools" / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition(";")[0].strip().split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), [pin for pin in pins if len(pin) != 2]
    return {package.lower().replace("_", "-"): version for package, version in pins}


def test_what_is_installed_without_dependencies_changes_nothing_that_is_there() -> None:
    """--no-deps looks at no constraint: a pin that differs would exchange a package under the tests' feet."""
    held = _pins("constraints")
    for name in ("demo", "vllm"):
        assert {package for package, version in _pins(name).items() if held.get(package, version) != version} == set()
    assert held["trl"].startswith("1.16.")
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"} & set(_pins("vllm"))


def test_the_oldest_triton_is_the_lower_end_of_the_extra() -> None:
    (extra,) = _pyproject()["project"]["optional-dependencies"]["triton"]
    (oldest,) = _pins("triton-oldest").values()
    assert extra.startswith(f"triton>={oldest.removesuffix('.0')},")


@pytest.mark.parametrize("name", sorted(MODEL_TYPES))
def test_bridge_entry_point_resolves(name: str) -> None:
    """Each entry is a bridge of the model_type's family."""
    (entry,) = importlib.metadata.entry_points(group="bestiary.bridges", name=name)
    bridge = entry.load()
    assert name.removesuffix("_text") == bridge.model_type.removesuffix("_text")


def test_auto_entry_point_loads_by_model_type() -> None:
    """`AutoDecoder.from_pretrained` reaches the bridges through this one."""
    (entry,) = importlib.metadata.entry_points(group="bestiary.bridges", name="auto")
    assert callable(entry.load().load)


@pytest.mark.parametrize("command", ["bestiary", "verify-bridge"])
def test_console_script_prints_help_with_an_example(command: str) -> None:
    """The installed script itself, next to the interpreter."""
    script = Path(sys.executable).with_name(command)
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout.lower()


def _fake_kernels_distribution(folder: Path) -> Path:
    """A stand-in for Hugging Face's `kernels`: every name exists, and class decorators hand back the class."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text(
        "class Anything:\n"
        "    def __init__(self, *args, **kwargs): pass\n"
        "    def __call__(self, *args, **kwargs): return args[0] if args and isinstance(args[0], type) else self\n"
        "    def __getattr__(self, name): return self\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return Anything()\n"
    )
    info = folder / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return folder


@pytest.mark.slow
def test_transformers_imports_from_the_root_beside_a_kernels_distribution(tmp_path: Path) -> None:
    """With PYTHONSAFEPATH the folder kernels/ does not shadow the package; without it transformers breaks."""
    packages = str(_fake_kernels_distribution(tmp_path / "site"))
    code = "import transformers.models.qwen3.modeling_qwen3, kernels; print(kernels.__file__)"
    safe = _run(code, cwd=ROOT, PYTHONPATH=packages, PYTHONSAFEPATH="1")
    assert safe.returncode == 0, safe.stderr
    assert safe.stdout.strip().startswith(packages)
    unsafe = _run(code, cwd=ROOT, PYTHONPATH=packages, PYTHONSAFEPATH="")
    assert unsafe.returncode != 0, "the folder no longer shadows the package: PYTHONSAFEPATH can go"
