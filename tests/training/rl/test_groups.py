"""Which processes of a group are new after a restart; no session of Ray is needed to see it."""

import os
import threading

import pytest

from bestiary.training.rl.groups import Group
from bestiary.training.rl.workers import RolloutWorker


@pytest.mark.parametrize(
    ("together", "dead", "new"), [(True, [], [0, 1]), (True, [1], [0, 1]), (False, [], []), (False, [1], [1])]
)
def test_ranks_of_one_run_are_all_new_also_where_all_of_them_live(monkeypatch, together, dead, new):
    """Alive they may be, and have lost one another: no collective of theirs comes to an end any more."""
    started = []
    made = object.__new__(Group)
    made._together, made.size, made._parts = together, 2, [None] * (1 if together else 2)
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
