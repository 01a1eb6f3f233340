"""The head of a Ray cluster that goes away is told, and only then."""

import socket
import time

import pytest

from bestiary.training.errors import ClusterLost
from bestiary.training.rl import cluster
from bestiary.training.rl.cluster import Watch


@pytest.mark.slow
def test_a_head_that_takes_no_connections_any_more_is_gone(monkeypatch):
    monkeypatch.setattr(cluster, "EVERY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as head:
        host, port = head.getsockname()
        watch = Watch(f"{host}:{port}")
        time.sleep(0.5)
        watch.check()
        assert not watch.gone
    deadline = time.monotonic() + 10
    while not watch.gone and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ClusterLost, match=rf"the head of the Ray cluster at {host}:{port} is gone") as caught:
        watch.check()
    assert "same command goes on" in caught.value.remedy


def test_without_a_watch_there_is_nothing_to_check():
    cluster.check_head()
