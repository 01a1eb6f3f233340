"""A run on Ray: N identical actors, each a process as torchrun would start it. The driver starts, listens and stops.

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set in every actor, which then calls
`bestiary.training.run.run` with the same configuration; rendezvous, collectives and checkpoints are torch's own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.training.config import RunConfig
from bestiary.training.control import Interruption
from bestiary.training.errors import InvalidRun, RankLost
from bestiary.training.run import Outcome, run
from bestiary.training.tracking import RunInfo, Tracker

POLL_S = 0.2
GRACE_S = 5.0  # in which the process that failed first is told from those that lost it
_DIED = "actor"
Event = tuple[str, tuple[Any, ...]]


class Member:
    """One process of the run; what an actor is made of."""

    def __init__(self) -> None:
        self._interruption, self._events = Interruption(), _Events()
        self._port: socket.socket | None = None

    def address(self) -> tuple[str, int]:
        """A name of this node for the others, and a port that nobody else is given while this process lives."""
        import ray

        self._port = _reserved_port()
        return ray.util.get_node_ip_address(), int(self._port.getsockname()[1])

    def run(self, config: Mapping[str, Any], folder: str, environment: Mapping[str, str]) -> Outcome | BestiaryError:
        """Train.

        Args:
            config: as plain values.   folder: that relative paths in it count from.   environment: of this rank.
        Returns:
            The outcome, or the error that ended it.
        """
        try:
            if not Path(folder).is_dir():
                raise InvalidRun(
                    f"{folder} is not there on {socket.gethostname()}.",
                    remedy="start from a folder that all nodes share",
                )
            os.chdir(folder)
            os.environ.update(environment)
            also = (self._events,) if environment["RANK"] == "0" else ()
            return run(RunConfig.model_validate(config), also=also, interruption=self._interruption)
        except BestiaryError as error:
            return error

    def events(self) -> list[Event]:
        """What trackers of the first process were told since the last call."""
        return self._events.taken()

    def stop(self, by: str) -> None:
        """End behind the step that runs, with a checkpoint."""
        self._interruption.by = by


class _Events:
    """A tracker whose calls are made again in another process."""

    def __init__(self) -> None:
        self._found: list[Event] = []
        self._lock = threading.Lock()

    def taken(self) -> list[Event]:
        with self._lock:
            found, self._found = self._found, []
        return found

    def _add(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self._found.append((name, arguments))

    def start(self, run: RunInfo) -> None:
        self._add("start", run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._add("log", step, dict(values))

    def close(self) -> None:
        self._add("close")


@dataclass(frozen=True)
class Placement:
    """Which part of a Ray cluster a run's processes get.

    Attributes:
        processes: of the whole run, an actor each.
        nodes: as many of them on each of so many nodes; None: wherever there is room.
        gpus: of each process, 0 or 1; None: 1 where the cluster has as many.
        cores: CPU cores of each process, which are its threads.
    """

    processes: int
    nodes: int | None = None
    gpus: int | None = None
    cores: int = 1

    def __post_init__(self) -> None:
        if self.nodes is not None and self.processes % self.nodes:
            raise InvalidRun(
                f"{self.processes} processes on {self.nodes} nodes, as many on each.",
                remedy=f"a multiple of {self.nodes}",
            )

    @property
    def per_node(self) -> int:
        """Processes on each node; all of them where nodes do not matter."""
        return self.processes // (self.nodes or 1)


def launch(config: RunConfig, place: int | Placement, *, also: Sequence[Tracker] = ()) -> Outcome:
    """`run(config)` in actors of Ray.

    A session of this process is used and left as it is; otherwise the cluster that RAY_ADDRESS names, or one on this
    machine that ends with the run. Actors print where they run and Ray shows it here; figures of steps come to `also`.
    SIGTERM or SIGINT here ends the run behind its step, with a checkpoint.

    Args:
        place: of the processes, or how many there are.   also: trackers in this process.
    Returns:
        The outcome in the first process.
    Raises:
        InvalidRun: Ray is not installed, or has no room for so many actors.
        RankLost: an actor died; the others are stopped, and the same call goes on from the newest checkpoint.
        BestiaryError: what ended the run in the actor where it began.
    """
    ray = _ray()
    place = Placement(place) if isinstance(place, int) else place
    with _session(ray, place), _reserved(ray, place, config.loop.timeout_s) as (gpus, bundles):
        # Threads: figures are asked for, and a stop is told, while `run` runs.
        actor = ray.remote(num_cpus=place.cores, num_gpus=gpus, max_concurrency=2, max_restarts=0)(Member)
        members = [
            actor.options(scheduling_strategy=bundles[rank // place.per_node]).remote()
            for rank in range(place.processes)
        ]
        try:
            return _followed(ray, config, members, also)
        finally:
            for member in members:
                ray.kill(member, no_restart=True)


def _followed(ray: Any, config: RunConfig, members: Sequence[Any], also: Sequence[Tracker]) -> Outcome:
    """Start all, pass on what the first one tells, and end with its outcome or with the first failure."""
    places = [member.address.remote() for member in members]
    ready, waiting = ray.wait(places, num_returns=len(places), timeout=config.loop.timeout_s)
    if waiting:
        raise InvalidRun(
            f"Ray has started {len(ready)} of {len(members)} actors in loop.timeout_s = {config.loop.timeout_s:g} s.",
            remedy="`ray status` shows what else its cores and GPUs are given to",
        )
    address = _result(ray, places[0], 0)
    if isinstance(address, BestiaryError):
        raise address
    host, port = address
    shared = {"WORLD_SIZE": str(len(members)), "MASTER_ADDR": host, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    plain = config.model_dump(mode="json")
    running = {
        member.run.remote(plain, os.getcwd(), shared | {"RANK": str(rank)}): rank for rank, member in enumerate(members)
    }
    outcomes: dict[int, Outcome] = {}
    failures: list[BestiaryError] = []
    deadline = float("inf")
    told = _Told(ray, members[0], also)
    with _stopping(members):
        while running and time.monotonic() < deadline:
            done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
            told.relay(POLL_S)
            for reference in done:
                rank = running.pop(reference)
                found = _result(ray, reference, rank)
                if isinstance(found, BestiaryError):
                    failures.append(found)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    outcomes[rank] = found
                    if rank == 0:
                        told.relay(config.loop.timeout_s)
            if any(_is_cause(error) for error in failures):
                break
    if failures:
        raise next((error for error in failures if _is_cause(error)), failures[0])
    return outcomes[0]


def _is_cause(error: BestiaryError) -> bool:
    """Whether it says more than that another process was lost."""
    return not isinstance(error, RankLost) or error.what.startswith(_DIED)


def _result(ray: Any, reference: Any, rank: int) -> Any:
    """What an actor returned, or that it died."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayActorError as error:
        return RankLost(
            f"{_DIED} {rank} of the run died ({str(error).splitlines()[0][:160]}); the others were stopped.",
            remedy="look for what it printed last; the same command goes on from the newest checkpoint",
        )


class _Told:
    """The calls of the first process's tracker, made here. What was asked for is waited for until it is there."""

    def __init__(self, ray: Any, first: Any, also: Sequence[Tracker]) -> None:
        self._ray, self._first, self._also = ray, first, also
        self._asked: Any = None

    def relay(self, patience_s: float) -> None:
        """Make those that are told within some seconds. A process that died has nothing more to tell."""
        if self._asked is None:
            self._asked = self._first.events.remote()
        with suppress(self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            found = self._ray.get(self._asked, timeout=patience_s)
            self._asked = None
            for name, arguments in found:
                for tracker in self._also:
                    getattr(tracker, name)(*arguments)


def _reserved_port() -> socket.socket:
    """A socket on a port that is free on every address, as torch's store listens on all of them.

    Nobody is given a port that is bound, and who asks for it by number and reuses addresses, as the store does, has it.
    """
    both = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    if both:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


@contextmanager
def _stopping(members: Sequence[Any]) -> Iterator[None]:
    """SIGTERM and SIGINT tell every member to stop behind its step; a second one ends at once."""
    heard: list[str] = []

    def tell(number: int, frame: FrameType | None) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(signal.Signals(number).name)
        for member in members:
            member.stop.remote(heard[0])

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InvalidRun("a run on Ray, and ray is not installed.", remedy="pip install 'bestiary[ray]'") from error
    return ray


@contextmanager
def _session(ray: Any, place: Placement) -> Iterator[None]:
    """A session of Ray: this process's own, or one that ends here."""
    if ray.is_initialized():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)  # Ray puts its own in its place, and leaves it there
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        cores = max(place.processes * place.cores, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cores, include_dashboard=False)  # not one that somebody started here
    try:
        yield
    finally:
        sys.stdout.flush()
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _reserved(ray: Any, place: Placement, patience_s: float) -> Iterator[tuple[int, list[Any]]]:
    """GPUs of each process, and for each node's share of them where Ray may start it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = int(sum(node.get("CPU", 0) for node in nodes))
    here = sum(node.get("GPU", 0) for node in nodes)
    gpus = int(here >= place.processes) if place.gpus is None else place.gpus
    if cores < place.processes * place.cores:
        raise InvalidRun(
            f"{place.processes} processes on Ray, which has {cores} CPU cores.",
            remedy="as many processes as it has cores, or more nodes",
        )
    if here < place.processes * gpus:
        raise InvalidRun(
            f"{place.processes} processes with a GPU each on Ray, which has {here:g} GPUs.",
            remedy="as many processes as it has GPUs, or more nodes",
        )
    if place.nodes is None:
        yield gpus, ["DEFAULT"]
        return
    needs = {"CPU": place.per_node * place.cores, "GPU": place.per_node * gpus}
    fitting = [node for node in nodes if all(node.get(name, 0) >= need for name, need in needs.items())]
    if len(fitting) < place.nodes:
        raise InvalidRun(
            f"{place.nodes} nodes with {needs['CPU']} CPU cores and {needs['GPU']} GPUs each, and Ray has "
            f"{len(fitting)} such among its {len(nodes)}.",
            remedy="fewer nodes or processes; `bestiary submit` without a cluster starts nodes on this machine",
        )
    group = ray.util.placement_group([needs] * place.nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(patience_s):
            raise InvalidRun(
                f"{place.nodes} nodes with {needs['CPU']} CPU cores and {needs['GPU']} GPUs each were not free within "
                f"loop.timeout_s = {patience_s:g} s.",
                remedy="`ray status` shows what their cores and GPUs are given to",
            )
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as strategy

        yield gpus, [strategy(group, placement_group_bundle_index=index) for index in range(place.nodes)]
    finally:
        ray.util.remove_placement_group(group)
