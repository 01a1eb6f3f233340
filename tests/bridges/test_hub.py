"""Names of the hub, and a hub that does not answer."""

import socket
import threading

import pytest

from bestiary.bridges import hub
from bestiary.bridges.errors import CheckpointNotFound, OfflineError
from bestiary.bridges.hub import commit_of, is_hub_id, resolve, resolve_tokenizer

COMMIT = "d" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one commit of the tokenizer `word` and of the model `some/model`, which `main` points to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("models--word", "models--some--model"):
        place = tmp_path / "hub" / name
        (place / "snapshots" / COMMIT).mkdir(parents=True)
        (place / "snapshots" / COMMIT / "config.json").write_text("{}")
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


@pytest.fixture
def silent(monkeypatch):
    """A hub that takes connections and says nothing; once asked, it tells what was wanted from it."""
    server, taken = socket.create_server(("127.0.0.1", 0)), []

    def take():
        while True:
            try:
                taken.append(server.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(hub, "PATIENCE_S", 0.3)

    def asked():
        for one in taken:
            one.settimeout(60)
        paths = [one.recv(200).decode().split()[1] for one in taken]
        return [path.removeprefix("/api/models/") for path in paths if path.startswith("/api/models/")]

    yield asked
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for one in taken:
        one.close()


def test_one_word_is_a_hub_id_of_a_tokenizer_alone(tmp_path, monkeypatch):
    assert is_hub_id("gpt2", one_word=True)
    assert is_hub_id("openai/gpt2", one_word=True)
    assert not is_hub_id("gpt2")
    for name in ("./gpt2", ".gpt2", "~", "a/b/c", "gpt2.gguf", "two words", ""):
        assert not is_hub_id(name, one_word=True), name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert not is_hub_id("gpt2", one_word=True)


@pytest.mark.parametrize("src", ["", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_tokenizer_of_a_path_that_leads_nowhere(src):
    with pytest.raises(CheckpointNotFound):
        resolve_tokenizer(src)


def test_a_hub_that_says_nothing_is_asked_once_and_the_cache_is_read(cache, silent):
    assert commit_of(resolve_tokenizer("word")) == COMMIT
    assert commit_of(resolve("some/model")) == COMMIT
    assert silent() == ["word", "some/model"]


def test_a_hub_that_says_nothing_of_what_is_not_cached_is_given_up(cache, silent):
    with pytest.raises(
        OfflineError, match=r"absent is no folder here\. As a hub id: absent is not in the local"
    ) as one:
        resolve_tokenizer("absent")
    assert "HF_HUB_OFFLINE=1 asks no hub" in one.value.remedy
    assert "Timeout" in one.value.what
    with pytest.raises(OfflineError, match=r"^some/absent@v2 is not in the local cache and the hub cannot be reached"):
        resolve("some/absent", revision="v2")
    assert silent() == ["absent", "some/absent/revision/v2"]


def test_a_commit_whose_files_are_known_is_asked_of_nobody(cache, silent):
    (cache / "models--word" / "trees").mkdir()
    (cache / "models--word" / "trees" / f"{COMMIT}.json").write_text("[]")
    assert hub._has_commit("word", COMMIT)
    assert not hub._has_commit("word", "main")
    assert not hub._has_commit("some/model", COMMIT)
    assert not silent()
