"""Processes of a role, as actors of Ray: who starts, places, asks and replaces them is verl's single controller.

`Group` is all that the rest of bestiary sees of it. A group is *together* (one process group of torch, which lives and
dies as one: a policy over N ranks) or a number of members that know nothing of one another (engines, references).

What verl 0.9.1 does that one has to know, on CPUs above all:

* `RayResourcePool` takes a GPU for each process unless told `use_gpu=False`, and `max_colocate_count` CPUs, ten by
  default: more than a small machine has. Both are always given here, and `Pool` refuses what there is no room for.
* Its `get_placement_groups` waits forever, and may put what was asked for on two nodes on one that has room for all. So
  `Pool` reserves the places, each node's on a node of its own.
* Without a GPU its platform is CUDA all the same; `integrations.verl_platform` is one for processors.
* A group asks in its bundle for an address before it makes actors, with a task that wants one CPU there. So actors here
  take none (Ray's default for them), else a group could not be replaced beside its neighbours.
* Its methods wait with `ray.get` and no timeout, and for the first in rank order: a process that hangs in a collective
  because another died would be waited for. What is registered here is `blocking=False`, and waited for by `Members`.
* Arguments are split over the workers if all are lists of the group's size, and only lists: `Dispatch.DP_COMPUTE` takes
  a tuple as well, and sends it whole to everybody. Ours are lists.
* What a constructor raises comes out as the actor's death. Ours do nothing; `build` makes what a worker hosts.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

from bestiary.kernels.errors import BestiaryError
from bestiary.training.control import named_failures
from bestiary.training.errors import ClusterLost, InvalidRun, RankLost, Role, RoleLost
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.verl_platform import INSTALL, CpuPlatform
from bestiary.training.rl.cluster import EVERY_S, check_head

with needs("ray", "bestiary[ray]"):
    import ray
    from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

with needs("verl", INSTALL), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.plugin.platform import set_platform
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray.base import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        SubRayResourcePool,
        split_resource_pool,
    )

GRACE_S = 5.0  # in which the process that died is told from those that lost it
everybody = partial(register, dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)()
shares = partial(register, dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)()
_NODE = "ray.io/node-id"  # the label of a node that is its id
_PASSED = ("PYTHONPATH", "PYTHONSAFEPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class RoleWorker(Worker):
    """One process of a role. Subclasses register what they can be asked: `everybody`, `shares`."""

    hosted: Any

    @everybody
    def build(self, make: Callable[[], Any], timeout_s: float) -> tuple[int, str, Any]:
        """Make what is hosted here; the ids of this process and its node, and what `describe` says.

        Args:
            make: gives it, or a context manager that does, which stays open while the process lives.
        """
        self._timeout_s = timeout_s
        # What arrives lies in Ray's shared memory, and nobody here writes into it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        with self.failing():
            made = make()
            self._open = ExitStack()
            self.hosted = self._open.enter_context(made) if isinstance(made, AbstractContextManager) else made
            return os.getpid(), ray.get_runtime_context().get_node_id(), self.describe()

    def describe(self) -> Any:
        """What the other side should know of it."""
        return None

    @everybody
    def ping(self) -> int:
        """The process id: it is alive and answers."""
        return os.getpid()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Torch's own words for a lost rank or no memory, as errors of ours."""
        with named_failures("see the log of this process", self._timeout_s):
            yield

    _timeout_s = 600.0


@dataclass
class Pool:
    """Where processes run: so many places, each with room for one process of several roles.

    Args:
        places: on each node alike.
        roles: that share the places, each with one process at a place; on GPUs each has a share of the GPU.
        nodes: that have them, each another one; None: each place is on any node.
        gpu: whether a place has a GPU; None: where as many are free as there are places.
        timeout_s: after which a cluster that gives nothing is given up.

    Raises:
        InvalidRun: the cluster has less.
    """

    places: int
    roles: int
    nodes: int | None = 1
    gpu: bool | None = None
    timeout_s: float = 600.0
    _pool: RayResourcePool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = self.size
        if self.gpu is None:
            self.gpu = ray.available_resources().get("GPU", 0) >= size
        for kind, wanted in (("CPU", size * self.roles), ("GPU", size if self.gpu else 0)):
            has, until = ray.cluster_resources().get(kind, 0), time.monotonic() + GRACE_S
            # What a run that just ended had is given back behind its end.
            while (free := ray.available_resources()).get(kind, 0) < wanted <= has and time.monotonic() < until:
                time.sleep(EVERY_S)
            if free.get(kind, 0) < wanted:
                raise InvalidRun(
                    f"{size} places for {self.roles} roles need {wanted} {kind}s of Ray; it has {has:g}, "
                    f"{free.get(kind, 0):g} of them free.",
                    remedy="fewer processes in `placement`, or more cores: on one machine `placement.cpus`",
                )
        if not self.gpu:
            _without_gpus()
        stores = [1] * self.places if self.nodes is None else [self.places] * self.nodes
        self._pool = RayResourcePool(stores, use_gpu=self.gpu, max_colocate_count=self.roles)
        self._reserve(stores)

    @property
    def size(self) -> int:
        """Places on all nodes."""
        return self.places * (self.nodes or 1)

    def part(self, first: int, count: int) -> SubRayResourcePool:
        """Places [first, first + count)."""
        cuts = [first, count, self.size - first - count]
        found = split_resource_pool(self._pool, cuts)
        chosen: SubRayResourcePool = found[1]
        return chosen

    def close(self) -> None:
        """Give the places back; without a head, there are none."""
        with suppress(ClusterLost):
            check_head()
            self._remove()

    def _reserve(self, stores: Sequence[int]) -> None:
        """What `RayResourcePool.get_placement_groups` does, which waits forever and may put all on one node."""
        place = {"CPU": float(self.roles)} | ({"GPU": 1.0} if self.gpu else {})
        needs = {kind: count * stores[0] for kind, count in place.items()}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = [node for node in nodes if all(node.get(kind, 0) >= count for kind, count in needs.items())]
        wanted = " and ".join(f"{count:g} {kind}s" for kind, count in needs.items())
        if len(fitting) < (self.nodes or 1):
            raise InvalidRun(
                f"{self.nodes or 1} nodes with {wanted} each, and Ray has {len(fitting)} such among its {len(nodes)}.",
                remedy="fewer processes in `placement`, more of `placement.nodes`, or larger nodes",
            )
        self._pool.pgs, taken = [], list[str]()
        until = time.monotonic() + self.timeout_s
        for count in stores:
            other = {_NODE: f"!in({', '.join(taken)})"} if taken else {}
            group = ray.util.placement_group([place] * count, "STRICT_PACK", bundle_label_selector=[other] * count)
            self._pool.pgs.append(group)
            while not group.wait(1):
                check_head()
                if time.monotonic() < until:
                    continue
                self._remove()
                raise InvalidRun(
                    f"no {'other ' if taken else ''}node had {wanted} free within {self.timeout_s:g} s.",
                    remedy="`ray status` shows what they are given to; a longer placement.timeout_s to wait for them",
                )
            if self.nodes is not None:
                taken += set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())

    def _remove(self) -> None:
        for group in self._pool.pgs or ():
            ray.util.remove_placement_group(group)
        self._pool.pgs = None


@dataclass(frozen=True)
class Members:
    """The living processes of a role, to be asked from anywhere: it travels.

    Attributes:
        role: what `RoleLost` says.   handles: of the actors, in order.
        together: they are ranks of one run of torch.   timeout_s: after which one that does not answer is lost.
    """

    role: Role
    handles: tuple[Any, ...]
    together: bool
    timeout_s: float

    def __len__(self) -> int:
        return len(self.handles)

    def ask(self, member: int, name: str, *arguments: Any) -> Any:
        """A reference to the answer of one member.

        Raises:
            RoleLost: it is known to be dead.
        """
        try:
            return getattr(self.handles[member], name).remote(*arguments)
        except RayActorError as error:
            raise self._lost(error, member) from error

    def answer(self, member: int, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The answer of one member; raises as `wait`."""
        return self.wait([self.ask(member, name, *arguments)], members=[member], timeout_s=timeout_s)[0]

    def tell(self, member: int, name: str, *arguments: Any) -> None:
        """Ask for something whose answer nobody waits for; of one that is dead, nothing."""
        with suppress(RoleLost):
            self.ask(member, name, *arguments)

    def every(self, name: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """The same asked of all; raises as `wait`."""
        asked = [self.ask(member, name, *arguments) for member in range(len(self))]
        return self.wait(asked, timeout_s=timeout_s)

    def wait(
        self, references: Sequence[Any], *, members: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Answers to references, in their order.

        Args:
            members: who was asked; None: all, in order.
        Raises:
            RoleLost: one died, or did not answer in time; before what others say of its death.
            ClusterLost: Ray's head is gone.
            BestiaryError: what one of them raised.
        """
        asked = range(len(references)) if members is None else members
        waiting = dict(zip(references, asked, strict=True))
        patience = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + patience
        found: dict[Any, Any] = {}
        failures: list[BaseException] = []
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, EVERY_S))
            check_head()
            if not done and left == 0.0:
                break
            for reference in done:
                member = waiting.pop(reference)
                found[reference] = self.read(reference, member)
                if isinstance(found[reference], BaseException):
                    failures.append(found[reference])
                    # The others may wait for it in a collective, and one of them may be the one that died.
                    deadline = min(deadline, time.monotonic() + (GRACE_S if self.together else 0.0))
            if any(isinstance(failure, RoleLost) for failure in failures):
                break
        if failures:
            raise _cause(failures, self.role)
        if waiting:
            silent = ", ".join(str(member) for member in waiting.values())
            raise RoleLost(
                f"{self.role} process {silent} of {len(self)} did not answer in {patience:g} s.",
                role=self.role,
                remedy="the controller starts it again; a longer placement.timeout_s if it only needs longer",
            )
        return [found[reference] for reference in references]

    def read(self, reference: Any, member: int) -> Any:
        """What a finished reference holds: the answer, or the error in place of it."""
        try:
            return ray.get(reference, timeout=self.timeout_s)
        except RayTaskError as error:
            return self._raised(error, member)
        except (RayActorError, GetTimeoutError, ObjectLostError) as error:
            return self._lost(error, member)

    def _raised(self, error: Any, member: int) -> BaseException:
        """What was raised there, itself; an error that is not of ours with a note of where."""
        cause = error.cause
        if not isinstance(cause, Exception):
            return cast(BaseException, error)
        if not isinstance(cause, BestiaryError):
            cause.add_note(f"in process {member} of role {self.role}:\n{error}")
        return cause

    def _lost(self, error: BaseException, member: int) -> RoleLost:
        return RoleLost(
            f"process {member} of {len(self)} of role {self.role} died ({_first_line(error)}).",
            role=self.role,
            remedy="the controller starts it again; look for what it printed last if it goes on dying",
        )


class Group:
    """Processes of one role.

    Args:
        role: what `RoleLost` says.
        worker: what each hosts.
        make: called in each of them, see `RoleWorker.build`; it travels there, so it is of module level, or a `partial`
            of what is.
        size: how many.   first: the place in the pool of the first of them.
        together: they are ranks of one run of torch, and replaced all at once.
        threads: calls that one of them answers at a time.
        timeout_s: after which one that does not answer counts as lost.
        environment: of the processes.

    Groups that are made one after the other start at the same time: whoever asks the first thing waits.

    Attributes:
        generations: how often each was started.   pids, nodes: of their processes, and where Ray has those.
    """

    def __init__(
        self,
        role: Role,
        worker: type[RoleWorker],
        make: Callable[[], Any],
        *,
        size: int,
        pool: Pool,
        first: int = 0,
        together: bool = False,
        threads: int = 1,
        timeout_s: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.role, self.size, self.timeout_s = role, size, timeout_s
        self._worker, self._make, self._together, self._threads = worker, make, together, threads
        self._environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        self._environment["VERL_LOGGING_LEVEL"] = os.environ.get("VERL_LOGGING_LEVEL", "ERROR")
        self._environment |= {} if pool.gpu else {"VERL_PLATFORM": "cpu"}
        self._environment |= environment or {}
        if together:
            self._parts = [pool.part(first, size)]
        else:
            self._parts = [pool.part(first + place, 1) for place in range(size)]
        self.generations = [0] * size
        self.pids, self.nodes = [0] * size, [""] * size
        self._described: list[Any] = [None] * size
        self._building: dict[int, Any] = {}
        self._lock = threading.RLock()  # players of episodes ask from threads of their own
        self._started: list[RayWorkerGroup | None] = [None] * len(self._parts)
        self._whole: RayWorkerGroup
        try:
            self._start(range(len(self._parts)))
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Ask all, or whom the method's dispatch says; their answers in order. Raises as `Members.wait`."""
        self._settle()
        try:
            asked = getattr(self._whole, name)(*arguments)
        except RayActorError as error:
            raise RoleLost(f"role {self.role} died ({_first_line(error)}).", role=self.role) from error
        return self._living.wait(asked if isinstance(asked, list) else [asked], timeout_s=timeout_s)

    @property
    def members(self) -> Members:
        """As they are now; those that are started later are others."""
        self._settle()
        return self._living

    @property
    def described(self) -> list[Any]:
        """What each said of what it hosts."""
        self._settle()
        return self._described

    @property
    def _living(self) -> Members:
        return Members(self.role, tuple(self._whole.workers), self._together, self.timeout_s)

    def _settle(self) -> None:
        """Until what was begun to be built is there, for whoever asks meanwhile too."""
        with self._lock:
            building, self._building = self._building, {}
            if building:
                told = self._living.wait([*building.values()], members=[*building])
                for member, (*where, described) in zip(building, told, strict=True):
                    (self.pids[member], self.nodes[member]), self._described[member] = where, described

    # ------------------------------------------------------------------ life

    def dead(self) -> list[int]:
        """Members that are dead or do not answer."""
        members = self._living
        self._building.clear()
        lost, asked = [], {}
        for member in range(self.size):
            try:
                asked[members.ask(member, "ping")] = member
            except RoleLost:
                lost.append(member)
        # Ranks of one run may wait for the dead one in a collective, and are replaced with it.
        patience = GRACE_S if self._together else self.timeout_s
        done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=patience) if asked else ([], [])
        lost += [asked[one] for one in done if isinstance(members.read(one, asked[one]), RoleLost)]
        return sorted([*lost, *(asked[one] for one in silent)])

    def restart(self) -> list[int]:
        """New processes in place of dead ones, of a group that is together in place of all; who is new.

        Raises:
            RoleLost: they died again.
        """
        with self._lock:
            dead = self.dead()
            if not dead and not self._together:  # ranks that live may have lost one another
                return []
            self._start(range(len(self._parts)) if self._together else dead)
            self._settle()
            return list(range(self.size)) if self._together else dead

    def close(self) -> None:
        """End all processes; without a head, they have ended."""
        with suppress(ClusterLost):
            check_head()
            self._kill_all()

    def _kill_all(self) -> None:
        for part in range(len(self._parts)):
            self._kill(part)

    def _start(self, parts: Sequence[int]) -> None:
        for part in parts:
            self._kill(part)
            made = RayClassWithInitArgs(cls=ray.remote(self._worker))
            made.update_options({"max_concurrency": self._threads, "max_restarts": 0})
            with needs("verl", INSTALL):
                self._started[part] = RayWorkerGroup(
                    resource_pool=self._parts[part],
                    ray_cls_with_init=made,
                    name_prefix=f"{self.role}{part}_{os.urandom(4).hex()}_",
                    device_name="cuda" if self._parts[part].use_gpu else "cpu",
                    worker_env=self._environment,
                )
        every = [worker for group in self._started if group is not None for worker in group.workers]
        self._whole = RayWorkerGroup.from_detached(
            worker_handles=every, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(self._worker))
        )
        new = list(range(self.size)) if self._together else list(parts)
        for member in new:
            self._building[member] = self._living.ask(member, "build", self._make, self.timeout_s)
            self.generations[member] += 1

    def _kill(self, part: int) -> None:
        group = self._started[part]
        for worker in () if group is None else group.workers:
            ray.kill(worker, no_restart=True)
        self._started[part] = None


@cache
def _without_gpus() -> None:
    set_platform(CpuPlatform())


def _cause(failures: Sequence[BaseException], role: Role) -> BaseException:
    """Which of several failures the others come from; a lost rank is a lost role."""
    lost = [failure for failure in failures if isinstance(failure, RoleLost)]
    told = [failure for failure in failures if not isinstance(failure, RankLost | RoleLost)]
    ranks = [
        RoleLost(failure.what, role=role, remedy=failure.remedy)
        for failure in failures
        if isinstance(failure, RankLost)
    ]
    return [*lost, *told, *ranks][0]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__
