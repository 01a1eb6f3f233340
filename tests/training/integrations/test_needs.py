"""A script whose library is missing says what to install."""

import importlib
import sys
from pathlib import Path

import pytest

from bestiary.training.integrations.example import InvalidRow, json_lines, read_rows
from bestiary.training.integrations.needs import MissingLibrary

SCRIPTS = {
    "accelerate_loop": ("accelerate", "'bestiary[accelerate]'"),
    "lightning_module": ("lightning", "'bestiary[lightning]'"),
    "peft_on_top": ("peft", "'bestiary[peft]'"),
    "transformers_trainer": ("accelerate", "'bestiary[accelerate]'"),
    "trl_head": ("trl", "'bestiary[trl]'"),
    "verl_engine": ("verl", "--no-deps -r tools/requirements/verl.txt"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_library_names_the_extra(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, extra = SCRIPTS[script]
    name = f"bestiary.training.integrations.{script}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for module in [known for known in sys.modules if known.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)  # what Python has for "there is no such package"
    with pytest.raises(MissingLibrary, match=library) as caught:
        importlib.import_module(name)
    assert f"pip install {extra}" in str(caught.value)


def test_a_row_without_tokens_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n{"ids": [1]}\n')
    with pytest.raises(InvalidRow, match="line 2"):
        read_rows(tmp_path / "rows.jsonl", "unused")


def test_lines_end_with_a_line_feed_alone(tmp_path: Path) -> None:
    """Not at U+2028, which JSON allows inside of strings; blank lines are none; bytes that are no text are named."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes('{"text": "a\u2028b"}\r\n\n{"text": "c"}\n'.encode())
    assert list(json_lines(file)) == [(1, {"text": "a\u2028b"}), (3, {"text": "c"})]
    file.write_bytes(b'{"input_ids": [1, 2]}\n{"text": "\xff"}\n')
    with pytest.raises(InvalidRow, match="line 2 is no JSON"):
        read_rows(file, "unused")
