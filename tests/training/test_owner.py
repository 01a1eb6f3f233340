"""One run at a time in a folder: the second is refused, and what a kill left behind holds nobody up."""

import json
import os
import signal
import threading
import time

import pytest

from bestiary.training import owner as owner_module
from bestiary.training.errors import FolderTaken
from bestiary.training.owner import OWNER, Owner, owned

from ..child import Child
from .rl.small_rounds import controller

HOLDING = """
import time
from pathlib import Path
from bestiary.training.owner import owned
with owned(Path(sys.argv[1])):
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("BEAT_S", 0.05), ("GONE_S", 600.0), ("GRACE_S", 0.3), ("POLL_S", 0.01)):
        monkeypatch.setattr(owner_module, name, seconds)


def somewhere_else(out, **told):
    """The file of an owner on another machine."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"name": "0", "host": "node7", "pid": 31, "machine": "node7 boot pid", "since": "yesterday", **told}
    (out / OWNER).write_text(json.dumps(content))


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_has_one_owner_at_a_time_and_nothing_of_him_afterwards(tmp_path):
    out = tmp_path / "runs" / "first"
    with owned(out):
        with pytest.raises(FolderTaken, match=rf"in the hands of process {os.getpid()} on ") as caught, owned(out):
            pass
        assert caught.value.read_from == str(out / OWNER)
        assert [file.name for file in out.iterdir()] == [OWNER]
    assert not (tmp_path / "runs").exists()
    out.mkdir(parents=True)
    (out / "config.yaml").touch()
    with owned(out):
        pass
    assert [file.name for file in out.iterdir()] == ["config.yaml"]


def test_an_owner_that_ends_in_time_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(owner_module, "GRACE_S", 60.0)
    first = Owner(tmp_path)
    first.take()
    threading.Timer(0.1, first.release).start()
    with owned(tmp_path):
        assert (tmp_path / OWNER).is_file()


@pytest.mark.slow
def test_a_killed_owner_of_this_machine_holds_nobody_up(tmp_path, monkeypatch):
    """Nor while nobody has asked for its exit, nor does another process with its number."""
    with Child(HOLDING, str(tmp_path)) as child:
        while not (tmp_path / OWNER).exists():
            assert child.poll() is None
            time.sleep(0.01)
        with pytest.raises(FolderTaken, match=f"process {child._process.pid} "), owned(tmp_path):
            pass
        left = (tmp_path / OWNER).read_bytes()
        child.send_signal(signal.SIGKILL)
        monkeypatch.setattr(owner_module, "GRACE_S", 60.0)
        with owned(tmp_path):
            pass
    mine = json.loads(left) | {"pid": os.getpid()}
    (tmp_path / OWNER).write_text(json.dumps(mine))
    with owned(tmp_path):
        pass


def test_an_owner_elsewhere_lives_while_it_touches_its_file(tmp_path, monkeypatch):
    somewhere_else(tmp_path)
    ended = threading.Event()

    def beat():
        while not ended.wait(0.02):
            os.utime(tmp_path / OWNER)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(FolderTaken, match="process 31 on node7, since yesterday"), owned(tmp_path):
            pass
    finally:
        ended.set()
        beating.join()
    monkeypatch.setattr(owner_module, "GONE_S", 0.6)
    start = time.monotonic()
    with owned(tmp_path):
        assert time.monotonic() - start >= 0.6
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("linux", [True, False])
def test_its_file_is_touched_also_where_linux_tells_nothing(tmp_path, monkeypatch, linux):
    if not linux:
        monkeypatch.setattr(owner_module, "_machine", lambda: None)
    with owned(tmp_path):
        before = (tmp_path / OWNER).stat().st_mtime_ns
        with pytest.raises(FolderTaken), owned(tmp_path):
            pass
        until(lambda: (tmp_path / OWNER).stat().st_mtime_ns > before)


@pytest.mark.parametrize("links", [True, False])
def test_of_several_that_want_a_dead_run_s_folder_one_gets_it(tmp_path, monkeypatch, links):
    monkeypatch.setattr(owner_module, "GONE_S", 0.2)
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    somewhere_else(tmp_path, pid=None)
    owners, told = [Owner(tmp_path) for _ in range(8)], []

    def want(one):
        try:
            one.take()
            told.append(one)
        except FolderTaken:
            told.append(None)

    threads = [threading.Thread(target=want, args=(one,)) for one in owners]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(told) == 8
    taken = [one for one in told if one is not None]
    until(lambda: sum(not one._lost.is_set() for one in taken) == 1)  # whoever thought that it was his has seen
    assert [one._mine for one in taken if not one._lost.is_set()] == [(tmp_path / OWNER).read_bytes()]
    for one in owners:
        one.release()
    assert list(tmp_path.iterdir()) == []


def _no_links(*names):
    raise PermissionError("no links here")


def test_who_slept_through_it_ends_before_a_resume_point_and_leaves_the_other_s_file(tmp_path):
    """Also a controller, which else writes one of what it has before it ends."""
    saved = []
    with owned(tmp_path) as owner:
        somewhere_else(tmp_path, name="other")
        assert owner._lost.wait(60)
        for ask in (lambda: owner.on_step(None, {}), lambda: owner.on_end(None)):
            with pytest.raises(FolderTaken, match="taken over by another run"):
                ask()
        made = controller(callbacks=[owner])
        made.roles.policy.save_state = lambda state, wait=False: saved.append(state)
        with pytest.raises(FolderTaken):
            made.fit()
    assert saved == []
    assert json.loads((tmp_path / OWNER).read_text())["name"] == "other"
