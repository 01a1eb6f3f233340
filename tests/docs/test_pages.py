"""Every block of code in the README and the docs is run or checked, page by page; `docs/pages.md` says how."""

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bestiary.training.config import RunConfig
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.config import GrpoConfig
from bestiary.training.sections import validated

from .commands import ROOT, check
from .workplace import lay_out, run_file

LANGUAGES = {"bash", "python", "yaml", "text"}
PAGES = [
    ROOT / name
    for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "THIRD_PARTY_NOTICES.md")
    if (ROOT / name).is_file()
] + sorted((ROOT / "docs").rglob("*.md"))
_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and the file that its first line names ("" for none)."""

    language: str
    text: str
    file: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, from top to bottom."""
    for found in _FENCE.finditer(page.read_text(encoding="utf-8")):
        named = re.match(r"# (\S+\.(?:py|yaml))\n", found[2])
        yield Block(found[1], found[2], named[1] if named else "")


WITH_CODE = [page for page in PAGES if any(block.language != "text" for block in blocks(page))]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pages")
    lay_out(place)
    return place


def _run_yaml(block: Block) -> None:
    content: dict[str, Any] = yaml.safe_load(block.text)
    if block.file:
        Path(block.file).write_text(block.text, encoding="utf-8")
    kind = GrpoConfig if "rewards" in content else RunConfig
    recipe = {} if kind is GrpoConfig else {"recipe": "sft"}  # which the command says
    below = run_file("rows", "chat") if kind is RunConfig else {**run_file("sums", "prompt"), "loop": {}}
    whole = content if "model" in content and "data" in content else _merged(below, content)
    validated(kind, recipe | whole, place="", read_from=block.file or "the block", error=InvalidRun)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(below[name], above[name]) for name in below if isinstance(above.get(name), dict)}
    return {**below, **above, **both}


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_work(
    page: Path, laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "page"
    shutil.copytree(laid_out, place)
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a page that asks the hub fails at once
    monkeypatch.syspath_prepend(str(place))
    names: dict[str, Any] = {"__name__": "page"}
    modules = set(sys.modules)
    try:
        for block in blocks(page):
            if block.language == "bash":
                for line in block.text.replace("\\\n", " ").splitlines():
                    check(line)
            elif block.language == "yaml":
                _run_yaml(block)
            elif block.language == "python" and block.file:
                (place / block.file).write_text(block.text, encoding="utf-8")
                ast.parse(block.text)
            elif block.language == "python":
                exec(compile(block.text, str(page), "exec"), names)
    finally:
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(place)):
                del sys.modules[name]


def test_every_block_says_what_it_is() -> None:
    """A block without a language would be checked by nobody."""
    odd = {(page.name, block.language) for page in PAGES for block in blocks(page) if block.language not in LANGUAGES}
    assert odd == set()


def test_every_cell_of_the_comparison_says_where_it_was_read() -> None:
    """A link, or a command of ours."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.partition("## Compared with others")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 5
    assert {len(row) for row in rows} == {8}
    assert [cell for row in rows for cell in row[1:] if not re.search(r"\]\(\S+\)|`.+`", cell)] == []


def test_every_fence_is_found() -> None:
    """An indented or unclosed fence would hide what stands in it."""
    for page in PAGES:
        marks = [line for line in page.read_text(encoding="utf-8").splitlines() if "```" in line]
        assert len(marks) == 2 * len(list(blocks(page))), page


@pytest.mark.parametrize(
    "line",
    [
        "bestiary fly",
        "bestiary sft run.yaml --wings",
        "verify-bridge qwen3 --wings",
        "make coffee",
        "ls",
        "pip install x",
    ],
)
def test_a_command_that_does_not_exist_is_seen(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(line)
