"""Which processes of a group are new after a restart; no session of Ray is needed to see it."""

import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from bestiary.training.errors import RoleLost
from bestiary.training.rl.groups import Group, Members
from bestiary.training.rl.remote_engine import EngineFacts, RolloutGroup
from bestiary.training.rl.workers import RolloutWorker


@pytest.mark.parametrize(
    ("together", "dead", "new"), [(True, [], [0, 1]), (True, [1], [0, 1]), (False, [], []), (False, [1], [1])]
)
def test_ranks_of_one_run_are_all_new_also_where_all_of_them_live(monkeypatch, together, dead, new):
    """Alive they may be, and have lost one another: no collective of theirs comes to an end any more."""
    started = []
    made = object.__new__(Group)
    made._together, made.size, made._parts = together, 2, [None] * (1 if together else 2)
    made._lock = threading.RLock()
    monkeypatch.setattr(made, "dead", lambda: dead, raising=False)
    monkeypatch.setattr(made, "_start", lambda parts: started.extend(parts), raising=False)
    monkeypatch.setattr(made, "_settle", lambda: None, raising=False)
    assert made.restart() == new
    assert started == ([0] if together else new)


def test_an_engine_that_hangs_while_it_samples_does_not_count_as_alive():
    worker, told = object.__new__(RolloutWorker), []
    worker._sampling = threading.Lock()
    asked = threading.Thread(target=lambda: told.append(worker.ping()))
    with worker._sampling:
        asked.start()
        asked.join(0.2)
        assert told == []
    asked.join(10)
    assert told == [os.getpid()]


def test_an_engine_that_hangs_while_it_receives_does_not_count_as_alive():
    worker, told, hangs = object.__new__(RolloutWorker), [], threading.Event()
    worker._sampling, worker.hosted = threading.Lock(), SimpleNamespace(receive=lambda tensors: hangs.wait(10))
    worker.open_stream()
    threads = [threading.Thread(target=worker.drop_stream), threading.Thread(target=lambda: told.append(worker.ping()))]
    for one in threads:
        one.start()
        one.join(0.2)
    assert told == []
    hangs.set()
    for one in threads:
        one.join(10)
    assert told == [os.getpid()]


def test_an_engine_that_hangs_while_it_receives_is_named_before_the_policy_that_sends(monkeypatch):
    """Who waits for the policy waits as long as the group's processes are given."""
    members = Members("rollout", (None,), together=False, timeout_s=60.0)
    facts = EngineFacts("Standalone", {"a": (1,)}, torch.float32, 8)
    sender = pickle.loads(pickle.dumps(RolloutGroup(SimpleNamespace(members=members, described=[facts]))))
    waited = []

    def every(self, name, *arguments, timeout_s=None):
        if name != "open_stream":
            waited.append(self.timeout_s if timeout_s is None else timeout_s)
            raise RoleLost(f"{name} was not answered.", role=self.role)

    monkeypatch.setattr(Members, "every", every)
    with pytest.raises(RoleLost, match="close_stream") as caught:
        sender.receive(iter(()))
    assert caught.value.role == "rollout"
    assert len(waited) == 2
    assert sum(waited) < members.timeout_s


def test_nobody_asks_a_process_before_it_hosts_anything(monkeypatch):
    """Players ask from several threads; the second of them waits for what the first one waits for."""
    built, told = threading.Event(), []

    def wait(references, *, members):
        assert built.wait(10)
        return [(1, "node", "described")]

    made = object.__new__(Group)
    made._lock, made._building = threading.RLock(), {0: "build"}
    made.pids, made.nodes, made._described = [0], [""], [None]
    monkeypatch.setattr(Group, "_living", property(lambda _: SimpleNamespace(wait=wait)))
    asked = [threading.Thread(target=lambda: told.append(made.described[0])) for _ in range(2)]
    for one in asked:
        one.start()
    asked[1].join(0.2)
    assert told == []
    built.set()
    for one in asked:
        one.join(10)
    assert (told, made.pids, made.nodes) == (["described"] * 2, [1], ["node"])
