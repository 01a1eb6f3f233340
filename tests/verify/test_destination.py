"""A result is written whole or not at all, and nobody waits minutes to learn that it cannot be written."""

import os
import stat
from pathlib import Path

import pytest

from bestiary.verify.cli import main
from bestiary.verify.destination import BadDestination, check, write_text


def test_a_file_ends_in_one_line_end_and_leaves_nothing_beside_it(tmp_path):
    for text in ("a", "a\n"):
        write_text(str(tmp_path / "out"), text)
        assert (tmp_path / "out").read_text() == "a\n"
    assert os.listdir(tmp_path) == ["out"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(str(target), "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_keeps_pointing_and_the_mode_stays(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_text(str(tmp_path / "link"), "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new\n"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(str(pipe), "text")
    assert os.read(reader, 100) == b"text\n"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("place", [".", "not-there/out.json"])
def test_a_place_that_cannot_be_written_to_is_named_beforehand(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadDestination, match=r"\." if place == "." else "not-there"):
        check(place)


@pytest.mark.parametrize("command", [["qwen3", "--level", "V0"], ["self-test", "qwen3"]])
def test_the_command_refuses_before_it_runs(command, tmp_path, capsys):
    assert main([*command, "--json", str(tmp_path / "no" / "out.json"), "--quiet"]) == 7
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "BadDestination" in shown.err
    assert not Path(tmp_path / "no").exists()
