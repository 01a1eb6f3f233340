"""The roles on Ray: proxies with the methods of the in-process objects, over groups that host exactly those.

A proxy divides what it is given over the processes of its group and puts answers together again, in order. What it is
asked twice it answers twice: ids and versions say what is meant, so a controller may ask again after `RoleLost`.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bestiary.training.errors import InvalidRun, RoleLost
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.groups import Group, Members
from bestiary.training.rl.packing import Column
from bestiary.training.rl.records import Experience, Trajectory
from bestiary.training.rl.remote_engine import RemoteEngine
from bestiary.training.rl.roles import Figures, Prompt, Sampler
from bestiary.training.rl.rollout import Rollout, RolloutEngine, Sampling
from bestiary.training.rl.weight_sync import Synced

T = TypeVar("T")
POLL_S = 0.01


class RemoteFrozen:
    """A `roles.Frozen`, with `Restarts`, over a group of `FrozenWorker`, each with the whole model."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """See `roles.Frozen`."""
        return _divided(self.group, "log_probs", experiences, _tokens(experiences), [*range(self.group.size)], column)

    def restart(self) -> None:
        """See `roles.Restarts`."""
        self.group.restart()

    def close(self) -> None:
        """End its processes."""
        self.group.close()


class RemotePolicy:
    """A `roles.Policy`, with `Restarts`, over the ranks of a policy: each is given a share of what is trained on.

    Attributes:
        version: see `roles.Policy`.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.version: int = group.described[0].version

    @property
    def _parts(self) -> list[int]:
        """Of each rank, which share is its."""
        return [facts.part for facts in self.group.described]

    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """See `roles.Frozen`."""
        return _divided(self.group, "log_probs", experiences, _tokens(experiences), self._parts, column)

    def forward_backward(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """See `roles.Policy`."""
        shares = _shares(experiences, balanced(_tokens(experiences), max(self._parts) + 1))
        found: dict[str, float] = self.group.call("forward_backward", [shares[part] for part in self._parts])[0]
        return found

    def optim_step(self) -> dict[str, float]:
        """See `roles.Policy`."""
        found: dict[str, float]
        found, self.version = self.group.call("optim_step")[0]
        return found

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `roles.Policy`."""
        names: Sequence[object] = range(len(prompts)) if keys is None else keys
        asked = [*zip(prompts, names, strict=True)]
        told = _divided(self.group, "sample", asked, [len(prompt) for prompt in prompts], self._parts, sampling)
        return [replace(one, prompt=place) for place, said in enumerate(told) for one in said]

    def sync(self, engine: RolloutEngine) -> Synced:
        """See `roles.Policy`. Weights go from the ranks to the engines, and not through this process.

        Raises:
            InvalidRun: an engine that is not on Ray.
            RoleLost: a process of the policy or of the engines died; the engines have no weights then.
        """
        if not isinstance(engine, RemoteEngine):
            raise InvalidRun(
                f"a policy in processes of its own, and an engine of class {type(engine).__name__} in this one.",
                remedy="placement.rollout at least 1",
            )
        engine.synced(None)
        found: Synced
        found, answered = self.group.call("sync", engine)[0]
        engine.synced(found.version, answered)
        return found

    def check(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """See `roles.Policy`."""
        shares = _shares(trajectories, balanced([len(one) for one in trajectories], max(self._parts) + 1))
        found: dict[str, float] = self.group.call("check", [shares[part] for part in self._parts])[0]
        return found

    def save_state(self, controller: Mapping[str, Any], *, wait: bool = False) -> None:
        """See `roles.Policy`."""
        self.group.call("save_state", dict(controller), wait)

    def load_state(self) -> Mapping[str, Any] | None:
        """See `roles.Policy`."""
        found: Mapping[str, Any] | None
        found, self.version = self.group.call("load_state")[0]
        return found

    def trained(self) -> Mapping[str, int]:
        """See `roles.Policy`."""
        found: Mapping[str, int] = self.group.call("trained")[0]
        return found

    def export(self, folder: Path) -> None:
        """See `roles.Policy`."""
        self.group.call("export", folder.absolute())

    def restart(self) -> None:
        """See `roles.Restarts`."""
        if self.group.restart():
            self.version = self.group.described[0].version

    def finish(self) -> None:
        """Wait for the resume point that is being written, whether it can be or not."""
        self.group.call("finish")

    def close(self) -> None:
        """End its processes."""
        self.group.close()


class RemoteScorer:
    """A `roles.Scorer`, with `Restarts`, over a group of `RewardWorker`; answers to one prompt stay together."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `roles.Scorer`."""
        names = list(dict.fromkeys(one.group_id for one in trajectories))
        sizes = Counter(one.group_id for one in trajectories)
        home = {
            names[n]: member
            for member, part in enumerate(balanced([sizes[name] for name in names], self.group.size))
            for n in part
        }
        parts: list[list[int]] = [[] for _ in range(self.group.size)]
        for place, one in enumerate(trajectories):
            parts[home[one.group_id]].append(place)
        return _in_order(parts, self.group.call("score", [[trajectories[n] for n in part] for part in parts]))

    def figures(self) -> Figures:
        """See `roles.Scorer`; of processes that died, nothing."""
        found: Counter[str] = Counter()
        members = self.group.members
        for member in range(len(members)):
            with suppress(RoleLost):
                found.update(members.answer(member, "figures"))
        return dict(found)

    def restart(self) -> None:
        """See `roles.Restarts`."""
        self.group.restart()

    def close(self) -> None:
        """End its processes."""
        self.group.close()


class RemoteEnvironments:
    """An `EnvironmentFactory`, with `Restarts`, over a group of `EnvironmentWorker`; episodes take turns at them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._begun = 0

    def __call__(self) -> RemoteEnvironment:
        """The world of one episode, in the next process."""
        self._begun += 1
        members = self.group.members
        return RemoteEnvironment(members, self._begun % len(members))

    def restart(self) -> None:
        """See `roles.Restarts`; episodes that were played in a process that died begin again."""
        self.group.restart()

    def close(self) -> None:
        """End its processes."""
        self.group.close()


class RemoteEnvironment:
    """An `Environment` in another process."""

    def __init__(self, members: Members, member: int) -> None:
        self._members, self._member, self._episode = members, member, os.urandom(8).hex()

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """See `Environment`."""
        found: Sequence[int] = self._members.answer(self._member, "reset", self._episode, prompt, seed)
        return found

    def step(self, said: Said) -> Heard:
        """See `Environment`."""
        found: Heard = self._members.answer(self._member, "step", self._episode, said)
        return found

    def cut_off(self) -> Mapping[str, float | None]:
        """See `Environment`."""
        found: Mapping[str, float | None] = self._members.answer(self._member, "cut_off", self._episode)
        return found

    def close(self) -> None:
        """See `Environment`; not waited for."""
        self._members.tell(self._member, "end", self._episode)


class SpreadSampler:
    """A `roles.Sampler`, with `Restarts`, on the engines of a group: one of them gives all answers to a prompt.

    Args:
        engine: all of them.
        players: a sampler in this process for each engine (`RemoteEngine.alone`).
        environments: that they play in, where those have processes: what `restart` starts again.
    """

    def __init__(
        self, engine: RemoteEngine, players: Sequence[Sampler], environments: RemoteEnvironments | None = None
    ) -> None:
        self.engine: RolloutEngine = engine
        self.environments = environments
        self._players = players
        self._ready: list[list[Trajectory]] = []
        self._fault: Exception | None = None

    def put(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """See `roles.Sampler`; whoever has the fewest in flight is given the next one."""
        busy = [(len(player.in_flight), number) for number, player in enumerate(self._players)]
        heapq.heapify(busy)
        given: list[list[Prompt]] = [[] for _ in self._players]
        for one in prompts:
            count, number = heapq.heappop(busy)
            given[number].append(one)
            heapq.heappush(busy, (count + 1, number))
        for player, chosen in zip(self._players, given, strict=True):
            player.put(chosen, sampling)

    def take(self, at_least: int) -> list[list[Trajectory]]:
        """See `roles.Sampler`. What is complete is kept when an engine's process died.

        A player's fault beside groups enough is told by the next call, as the player itself may go on by then.
        """
        if at_least > len(self.in_flight):
            raise InvalidRun(
                f"{at_least} groups are asked for and {len(self.in_flight)} are in flight.",
                remedy="put before take, and nothing after close",
            )
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        while True:
            for player in self._players:
                try:
                    self._ready += player.take(0)
                except Exception as error:  # noqa: BLE001 (raised below, once the others have given what they have)
                    fault = fault or error
            if len(self._ready) >= at_least and (self._ready or fault is None):
                taken, self._ready = self._ready, []
                # A process that is still dead says so again.
                self._fault = None if isinstance(fault, RoleLost) else fault
                return taken
            if fault is not None:
                raise fault
            time.sleep(POLL_S)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """See `roles.Sampler`."""
        ready = [group[0].prompt_id for group in self._ready]
        return (*ready, *(name for player in self._players for name in player.in_flight))

    def pause(self) -> None:
        """See `roles.Sampler`."""
        for player in self._players:
            player.pause()

    def resume(self) -> None:
        """See `roles.Sampler`."""
        for player in self._players:
            player.resume()

    def restart(self) -> None:
        """See `roles.Restarts`: of the environments. Engines are restarted by themselves."""
        if self.environments is not None:
            self.environments.restart()

    def close(self) -> None:
        """See `roles.Sampler`; ends the processes of engines and environments."""
        for player in self._players:
            player.close()
        self.engine.close()
        if self.environments is not None:
            self.environments.close()


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Places of `sizes` in so many parts of about the same sum, each ascending."""
    loads = [(0, part) for part in range(parts)]
    found: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        load, part = heapq.heappop(loads)
        found[part].append(place)
        heapq.heappush(loads, (load + sizes[place], part))
    return [sorted(part) for part in found]


def _shares(given: Sequence[T], parts: Sequence[Sequence[int]]) -> list[list[T]]:
    return [[given[place] for place in part] for part in parts]


def _tokens(experiences: Sequence[Experience]) -> list[int]:
    return [len(one.trajectory) for one in experiences]


def _divided(
    group: Group, name: str, given: Sequence[Any], sizes: Sequence[int], ranks: Sequence[int], *also: Any
) -> list[Any]:
    """What a method makes of everything given, each share asked of the processes whose share it is.

    Args:
        ranks: of each process, the number of its share.
    """
    parts = balanced(sizes, max(ranks) + 1)
    shares = _shares(given, parts)
    told = group.call(name, [shares[part] for part in ranks], *([one] * group.size for one in also))
    return _in_order(parts, [told[ranks.index(part)] for part in range(len(parts))])


def _in_order(parts: Sequence[Sequence[int]], told: Iterable[Sequence[T]]) -> list[T]:
    """What was made of the parts, where what it was made of stood."""
    found = {place: one for part, made in zip(parts, told, strict=True) for place, one in zip(part, made, strict=True)}
    return [found[place] for place in range(len(found))]
