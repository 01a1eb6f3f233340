"""What leaves the house: changelog, notices, bill of materials, source distribution. `make release` tries the wheel."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bestiary.tools import release, sbom
from bestiary.tools.cli import main
from bestiary.tools.release import ReleaseFailed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_has_its_part_of_the_changelog() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[0] == PROJECT["version"]
    assert len(set(heads)) == len(heads)


def test_the_command_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code
    assert capsys.readouterr().out == f"bestiary {PROJECT['version']}\n"


def test_every_requirement_stands_in_the_notices() -> None:
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8")
    texts = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    names = {Requirement(text).name for text in texts} - {"bestiary"}
    assert sorted(name for name in names if f"{name} (" not in notices) == []


def test_no_source_file_has_a_header_of_its_own() -> None:
    """One licence for all, as the notices say."""
    portions = ("kernels", "models", "bridges", "verify", "training", "tools")
    files = [path for portion in portions for path in (ROOT / portion).rglob("*.py")]
    marked = re.compile(r"copyright|spdx-license-identifier", re.IGNORECASE)
    own = [path for path in files if marked.search("\n".join(path.read_text(encoding="utf-8").splitlines()[:20]))]
    assert [str(path.relative_to(ROOT)) for path in own] == []


@pytest.mark.slow
def test_the_bill_of_materials_holds_every_requirement_in_the_version_that_is_here() -> None:
    made = sbom.bill()
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert made == json.loads(json.dumps(sbom.bill())), "the same packages give the same document"
    listed = {one["name"]: one["version"] for one in made["components"]}
    from importlib.metadata import version

    for text in PROJECT["dependencies"]:
        name = canonicalize_name(Requirement(text).name)
        assert listed[name] == version(name)
    refs = {one["bom-ref"] for one in (*made["components"], made["metadata"]["component"])}
    edges = [edge for one in made["dependencies"] for edge in (one["ref"], *one["dependsOn"])]
    assert set(edges) == refs
    torch = next(one for one in made["dependencies"] if one["ref"].startswith("pkg:pypi/torch@"))
    assert any(ref.startswith("pkg:pypi/sympy@") for ref in torch["dependsOn"])


def test_the_bill_holds_what_an_extra_brings_of_a_package_that_is_known_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One requirement asks for the package, another one for it with the extra; and a cycle ends."""
    requires = {"root": ["a", "b"], "a": ["plain[more]"], "b": ["plain"], "plain": ['c; extra == "more"'], "c": ["b"]}
    made = {name: SimpleNamespace(requires=texts) for name, texts in requires.items()}
    monkeypatch.setattr(sbom, "distribution", lambda name: made[name])
    for order in (["a", "b"], ["b", "a"]):
        made["root"].requires = order
        assert sbom.collect("root") == ({name: made[name] for name in sorted(made)}, [])


@pytest.mark.slow
def test_a_source_distribution_builds_the_wheel_and_holds_what_people_read(tmp_path: Path) -> None:
    """Its tree is that of `git ls-files`, so a file that is not packaged is missing here as it would be elsewhere."""
    tree = tmp_path / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "ports/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).symlink_to(ROOT / name)
    source, wheel = release.build(tree, tmp_path / "dist")
    assert wheel.stat().st_size > 10**5
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"CHANGELOG.md", "LICENSE", "THIRD_PARTY_NOTICES.md", "README.md", "docs/errors.md", "models/qwen3.py"}
    assert wanted <= held
    assert not [name for name in held if name.startswith(("tests/", "out/", ".ci/"))]


def test_a_command_that_fails_ends_the_release_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ReleaseFailed, match=r"ended with 3:\nno more"):
        release._run([sys.executable, "-c", "print('no more'); raise SystemExit(3)"], cwd=tmp_path)


def test_a_command_that_hangs_ends_the_release_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "TIMEOUT_S", 0.1)
    with pytest.raises(ReleaseFailed, match=r"sleep\(60\) took more than 0\.1 s"):
        release._run([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path)
