"""The session of Ray that a run's roles live in, and a watch over its head.

Ray itself says nothing of a head that is gone: answers never come, and after a minute its library ends the process. So
the head is asked for a connection twice a second, and whoever waits for an answer is told.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bestiary.training.errors import ClusterLost, InvalidRun
from bestiary.training.integrations.needs import needs

with needs("ray", "bestiary[ray]"):
    import ray

EVERY_S = 0.5
MISSES = 3  # in a row, after which it is gone: a new one takes longer to start


class Watch:
    """Connections to the head of a session, from a thread.

    Args:
        address: host:port of its control store.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._where = address, (host.strip("[]"), int(port))
        self._gone, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._look, name="head", daemon=True).start()

    @property
    def gone(self) -> bool:
        """Whether the head was lost, ever."""
        return self._gone.is_set()

    def check(self) -> None:
        """Nothing, while it is there.

        Raises:
            ClusterLost.
        """
        if self.gone:
            raise ClusterLost(
                f"the head of the Ray cluster at {self._address} is gone, and the run's actors with it.",
                remedy="start the cluster again; the same command goes on from the newest resume point",
            )

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        missed = 0
        while not self._ended.wait(EVERY_S) and not self.gone:
            try:
                with socket.create_connection(self._where, timeout=EVERY_S):
                    missed = 0
            except OSError:
                missed += 1
                if missed >= MISSES:
                    self._gone.set()


_watch: Watch | None = None


def check_head() -> None:
    """Nothing, while the head of this process's session is there, or nobody watches it.

    Raises:
        ClusterLost.
    """
    if _watch is not None:
        _watch.check()


@contextmanager
def session(cpus: int | None = None) -> Iterator[None]:
    """A session of Ray: this process's own, the cluster that RAY_ADDRESS names, or one on this machine that ends here.

    Args:
        cpus: logical ones of a session on this machine, for it starts no more processes than it has of them; None: the
            machine's.
    Raises:
        InvalidRun: nobody answers at RAY_ADDRESS.
    """
    global _watch
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of one call the first error is told, and not by Ray
    before = signal.getsignal(signal.SIGTERM)  # Ray puts its own in its place, and leaves it there
    mine = not ray.is_initialized()
    if mine and "RAY_ADDRESS" in os.environ:
        try:
            ray.init()
        except ConnectionError as error:
            raise InvalidRun(
                f"RAY_ADDRESS = {os.environ['RAY_ADDRESS']}, and no cluster of Ray answers there.",
                remedy="start one (ray start --head), or unset RAY_ADDRESS to have one on this machine",
            ) from error
    elif mine:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    outer, _watch = _watch, Watch(ray.get_runtime_context().gcs_address)
    try:
        yield
    finally:
        gone, watch = _watch.gone, _watch
        watch.end()
        _watch = outer
        if mine and not gone:  # of a head that is gone nothing can be asked, not even an end
            sys.stdout.flush()
            ray.shutdown()


def enter(folder: str) -> None:
    """Work in the folder that relative paths of a run's file count from.

    Raises:
        InvalidRun: it is not on this node.
    """
    if not Path(folder).is_dir():
        raise InvalidRun(
            f"{folder} is not there on {socket.gethostname()}.", remedy="start from a folder that all nodes share"
        )
    os.chdir(folder)
