"""Runs as jobs of a Ray cluster: submitted, followed, stopped and listed over its Jobs API.

A job is the command that a person types on one machine, `bestiary sft run.json --ray N --nodes K …`, started on the
cluster's head. What travels with it is the checked configuration and the modules that it names, never data or weights:
those, and `out`, lie where every node finds them. A job submitted again with the same `out` goes on where that stands.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bestiary.training.errors import InvalidRun
from bestiary.training.launch import Placement

ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray lets the first that is set override any other
MODULES_MIB = 64  # what may be uploaded
POLL_S = 0.5
START_S = 60.0  # in which a cluster that has just started takes a job
ENDED = frozenset({"succeeded", "failed", "stopped"})
_EXTRA = "pip install 'bestiary[ray]'"
_HEEDED = frozenset({".gitignore", ".rayignore"})  # by Ray, when it uploads
_COMMAND, _OUT = "bestiary.command", "bestiary.out"  # keys of a job's metadata


@dataclass(frozen=True)
class Submission:
    """What is started.

    Attributes:
        command: of `bestiary`.   config: its checked file as plain values.   out: the run's folder, absolute.
        place: of its processes.
        modules: files and folders that the configuration names by `module:name`; every process can import them. Of a
            folder, nothing hidden travels, and no __pycache__.
        environment: of every process.
        stop_s: what a stopped run is given for its step and checkpoint before it is killed.
        alone: the command takes its file and nothing else, and is the one process of the job.
        reserves: of one alone: it computes there, with the cores and GPUs of `place`; else in actors that it starts.
    """

    command: str
    config: Mapping[str, Any]
    out: Path
    place: Placement
    modules: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s: float = 600.0
    alone: bool = False
    reserves: bool = True


@dataclass(frozen=True)
class Job:
    """What the cluster says of a run.

    Attributes:
        id: on the cluster.   command, out: of the run.   status: pending, running, succeeded, failed or stopped.
        exit_code: of the command, None where it has none.   message: of the cluster.
        started, ended: seconds since 1970, or None.
    """

    id: str
    command: str
    out: str
    status: str
    exit_code: int | None
    message: str
    started: float | None
    ended: float | None


class Jobs:
    """The runs of one cluster.

    Args:
        address: of its dashboard (http://head:8265) or of the cluster (head:6379, auto).
    Raises:
        InvalidRun: Ray or its dashboard is not installed here; nobody answers there.
    """

    def __init__(self, address: str) -> None:
        sdk = jobs_sdk()
        with _environment(dict.fromkeys(ADDRESSES)):
            try:
                self._client = sdk.JobSubmissionClient(address)
            except (ConnectionError, ValueError, RuntimeError) as problem:
                raise InvalidRun(
                    f"no Ray cluster with its dashboard answers at {address} ({_line(problem)}).",
                    remedy="ray start --head on one machine, or --address http://HEAD:8265 (RAY_ADDRESS) of a cluster; "
                    "without an address a cluster on this machine lives as long as its run",
                ) from problem
        self.address: str = self._client.get_address()

    def submit(self, run: Submission) -> str:
        """Start a run; returns its job's id.

        Raises:
            InvalidRun: the cluster has too few nodes, cores or GPUs; a job trains in the same folder; the modules are
                too large; the cluster refuses.
        """
        self._check_room(run.place)
        for job in self.listed():
            if job.out == str(run.out) and job.status not in ENDED:
                raise InvalidRun(
                    f"out = {run.out} is in the hands of {job.id}, which is {job.status}.",
                    remedy=f"bestiary jobs stop {job.id}, or bestiary jobs logs {job.id} --follow, or another out",
                )
        computes = run.alone and run.reserves
        name = f"{run.out.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with tempfile.TemporaryDirectory(prefix="bestiary-job-") as folder:
            _pack(Path(folder), run)
            with _refusals(f"the cluster at {self.address} did not take the job"):
                return self._started(
                    entrypoint=_entry(run),
                    submission_id=name,
                    runtime_env={
                        "working_dir": folder,
                        "env_vars": {**run.environment, "RAY_JOB_STOP_WAIT_TIME_S": str(int(run.stop_s))},
                    },
                    metadata={_COMMAND: run.command, _OUT: str(run.out)},
                    entrypoint_num_cpus=run.place.cores if computes else 0,
                    entrypoint_num_gpus=(run.place.gpus or 0) if computes else 0,
                )

    def _started(self, **job: Any) -> str:
        """The id of a job that the cluster took; a head that has just started takes none for some seconds."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return str(self._client.submit_job(**job))
            except RuntimeError as problem:
                if "No available agent" not in str(problem) or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def listed(self) -> list[Job]:
        """Our jobs on the cluster, the newest first."""
        with _refusals(f"the cluster at {self.address} does not list its jobs"):
            found = self._client.list_jobs()
        ours = [_job(one) for one in found if one.submission_id and _COMMAND in (one.metadata or {})]
        return sorted(ours, key=lambda job: job.started or float("inf"), reverse=True)

    def find(self, name: str | Path) -> Job:
        """The job with this id, or the newest one with this `out`."""
        out = str(Path(name).absolute())
        jobs = self.listed()
        for job in jobs:
            if job.id == str(name) or job.out == out:
                return job
        known = ", ".join(job.id for job in jobs[:5]) or "none"
        raise InvalidRun(
            f"no job {str(name)!r}, and none whose out is {out}, on the cluster at {self.address}.",
            remedy=f"bestiary jobs list; the newest: {known}",
        )

    def logs(self, identity: str) -> str:
        """Everything that a job has printed."""
        with _refusals(f"the cluster has no output of {identity}"):
            text: str = self._client.get_job_logs(identity)
        return text

    def stop(self, identity: str) -> None:
        """Ask a job to end behind its step, with a checkpoint; returns at once."""
        with _refusals(f"{identity} cannot be stopped"):
            self._client.stop_job(identity)

    def wait(self, identity: str) -> Job:
        """Until a job has ended."""
        while (job := self._details(identity)).status not in ENDED:
            time.sleep(POLL_S)
        return job

    def follow(self, identity: str, write: Callable[[str], object], *, stops: bool = False) -> Job:
        """Pass on what a job prints until it has ended.

        Args:
            write: is given text.
            stops: SIGINT or SIGTERM here stops the job and its end is waited for, a second one is not; otherwise a
                signal ends the following alone and the job runs on.
        """
        return asyncio.run(self._follow(identity, write, stops))

    async def _follow(self, identity: str, write: Callable[[str], object], stops: bool) -> Job:
        heard: asyncio.Queue[None] = asyncio.Queue()
        told = False
        following = asyncio.ensure_future(self._tail(identity, write))
        with _hearing(heard):
            while True:
                signalled = asyncio.ensure_future(heard.get())
                await asyncio.wait({following, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    signalled.cancel()
                    return following.result()
                if told or not stops:
                    following.cancel()
                    return await asyncio.to_thread(self._details, identity)
                told = True
                await asyncio.to_thread(self.stop, identity)

    async def _tail(self, identity: str, write: Callable[[str], object]) -> Job:
        """A connection that breaks is made again; what it says a second time is left out."""
        import aiohttp

        seen = 0
        while True:
            job = await asyncio.to_thread(self._details, identity)
            place, broken = 0, False
            try:
                async for text in self._client.tail_job_logs(identity):
                    write(text[max(seen - place, 0) :])
                    place += len(text)
                    seen = max(seen, place)
            except (RuntimeError, aiohttp.ClientError):
                broken = True
            if job.status in ENDED and not broken:
                return job
            await asyncio.sleep(POLL_S)

    def _details(self, identity: str) -> Job:
        with _refusals(f"the cluster says nothing of {identity}"):
            return _job(self._client.get_job_info(identity))

    def _check_room(self, place: Placement) -> None:
        """Refuse what the cluster's nodes cannot hold even when nothing else runs on them."""
        from ray.util.state import list_nodes
        from ray.util.state.exception import RayStateApiException

        with _environment(dict.fromkeys(ADDRESSES)):
            try:
                nodes = list_nodes(address=self.address, filters=[("state", "=", "ALIVE")], limit=10_000)
            except RayStateApiException as problem:
                raise InvalidRun(
                    f"the cluster at {self.address} does not list its nodes ({_line(problem)})."
                ) from problem
        count = place.nodes or 1
        needs = {"CPU": place.per_node * place.cores, "GPU": place.per_node * (place.gpus or 0)}
        fitting = [node for node in nodes if all((node.resources_total or {}).get(n, 0) >= m for n, m in needs.items())]
        if len(fitting) < count:
            have = "; ".join(
                f"{node.resources_total.get('CPU', 0):g} cores, {node.resources_total.get('GPU', 0):g} GPUs"
                for node in nodes[:8]
            )
            raise InvalidRun(
                f"{count} nodes with {needs['CPU']} CPU cores and {needs['GPU']} GPUs each, and {len(fitting)} of the "
                f"cluster's {len(nodes)} are such ({have}).",
                remedy="fewer --nodes, --gpus-per-node or --processes-per-node, or a larger cluster",
            )


# ---------------------------------------------------------------------- a cluster of this machine


@contextmanager
def local_cluster(nodes: int, cores: int, gpus: int = 0) -> Iterator[str]:
    """A Ray cluster on this machine, its dashboard on loopback alone, that ends with the block.

    Args:
        nodes: raylets, each one a node.   cores: CPU cores of each, which Ray counts and does not enforce.
        gpus: of this machine's, for each.
    Yields:
        The address of its dashboard.
    Raises:
        InvalidRun: Ray or its dashboard is not installed; the machine has fewer GPUs.
    """
    jobs_sdk()
    _check_gpus(nodes * gpus)
    from ray.cluster_utils import Cluster

    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Its own folder: `ray.init()` of other programs looks for clusters in the usual one. Sockets need short paths.
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        _environment({**dict.fromkeys(ADDRESSES), "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}),
    ):
        cluster = Cluster()
        # No port: 8265, or the next that no dashboard of another cluster has.
        head: dict[str, Any] = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": None}
        try:
            for index in range(nodes):
                cluster.add_node(
                    num_cpus=cores,
                    num_gpus=gpus,
                    env_vars=_devices(index, gpus),
                    dashboard_agent_listen_port=None,  # any: other clusters of this machine have the usual one
                    **(head if index == 0 else {}),
                )
            yield f"http://{cluster.webui_url}"
        finally:
            cluster.shutdown()
            if threading.current_thread() is threading.main_thread():
                for number, handler in known.items():  # Ray leaves its own
                    signal.signal(number, handler)


def _check_gpus(wanted: int) -> None:
    if not wanted:
        return
    import torch

    if torch.cuda.device_count() < wanted:
        raise InvalidRun(
            f"{wanted} GPUs, no cluster's address, and this machine has {torch.cuda.device_count()}.",
            remedy="--address or RAY_ADDRESS=http://HEAD:8265 of a cluster, or --processes-per-node on CPUs",
        )


def _devices(index: int, gpus: int) -> dict[str, str] | None:
    """Which GPUs the index'th node has."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(index * gpus, (index + 1) * gpus)))} if gpus else None


# ---------------------------------------------------------------------- parts


def jobs_sdk() -> Any:
    """Ray's module of jobs.

    Raises:
        InvalidRun: Ray is not installed, or without its dashboard.
    """
    try:
        import ray.job_submission as sdk
    except ImportError as problem:
        raise InvalidRun("a job on Ray, and ray is not installed.", remedy=_EXTRA) from problem
    try:
        import ray.dashboard.optional_deps  # noqa: F401
    except ImportError as problem:
        raise InvalidRun(
            f"a job on Ray, which is installed without its dashboard ({_line(problem)}).", remedy=_EXTRA
        ) from problem
    return sdk


def _entry(run: Submission) -> str:
    """The job's shell command.

    It works in the folder that it was submitted from, where the cluster has it, and in this Python, where it has that.
    """
    place = run.place
    options: list[str | int] = []
    if not run.alone:
        options = ["--ray", place.processes, "--nodes", place.nodes or 1, "--cores", place.cores]
        options += [] if place.gpus is None else ["--gpus", place.gpus]
    python, folder = shlex.quote(sys.executable), shlex.quote(str(Path.cwd()))
    command = shlex.join(["-P", "-m", "bestiary.tools.cli", run.command])
    return (
        f'config="$PWD/run.json"; python={python}; [ -x "$python" ] || python=python; '
        f'[ -d {folder} ] && cd {folder}; exec "$python" {command} "$config" {shlex.join(map(str, options))}'
    )


def _pack(folder: Path, run: Submission) -> None:
    """The configuration and modules of a run, as they are uploaded.

    Raises:
        InvalidRun: a module is not there, or all of them are too large.
    """
    (folder / "run.json").write_text(json.dumps(run.config), encoding="utf-8")
    copied: dict[Path, Path] = {}  # to where
    for module in run.modules:
        if not module.exists():
            raise InvalidRun(f"module {module} is not there.", remedy="a .py file or the folder of a package")
        if module.is_file():
            copied[module] = folder / module.name
        else:
            home = folder / module.resolve().name
            copied |= {file: home / file.relative_to(module) for file in _code(module)}
    sizes = {file: file.stat().st_size for file in copied}
    if sum(sizes.values()) > MODULES_MIB * 2**20:
        largest = max(sizes, key=lambda file: sizes[file])
        raise InvalidRun(
            f"modules of {sum(sizes.values()) / 2**20:.0f} MiB, at most {MODULES_MIB} travel; largest: {largest}.",
            remedy="modules of code alone; data and weights lie where every node finds them, or behind a URL",
        )
    for file, target in copied.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def _code(folder: Path) -> Iterator[Path]:
    """Files of a package that travel: what is hidden (.git, .env, …) may be secret, and __pycache__ is made anew.

    `.gitignore` and `.rayignore` do, since Ray leaves out what they name.
    """
    seen: set[str] = set()  # a link may lead to a folder above it
    for place, below, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not name.startswith(".") and name != "__pycache__"]
        kept = [Path(place, name) for name in names if not name.startswith(".") or name in _HEEDED]
        yield from (file for file in kept if file.is_file())


def _job(found: Any) -> Job:
    metadata = found.metadata or {}
    return Job(
        id=found.submission_id,
        command=metadata.get(_COMMAND, ""),
        out=metadata.get(_OUT, ""),
        status=str(found.status.value).lower(),
        exit_code=found.driver_exit_code,
        message=found.message or "",
        started=None if found.start_time is None else found.start_time / 1000,
        ended=None if not found.end_time else found.end_time / 1000,
    )


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Ray's errors of an answer that is no success, as ours."""
    try:
        yield
    except (RuntimeError, ConnectionError, ValueError) as problem:
        raise InvalidRun(f"{what} ({_line(problem)}).", remedy="bestiary jobs list shows what it has") from problem


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables set, or with None unset, inside."""
    before = {name: os.environ.get(name) for name in values}

    def put(these: Mapping[str, str | None]) -> None:
        for name, value in these.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


@contextmanager
def _hearing(heard: asyncio.Queue[None]) -> Iterator[None]:
    """SIGINT and SIGTERM in the queue; a thread that is not the main one hears none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in known:
        loop.add_signal_handler(number, heard.put_nowait, None)
    try:
        yield
    finally:
        for number, handler in known.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]
