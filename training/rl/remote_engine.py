"""Rollout engines in other processes, seen as one: a `WeightReceiver` whose weights travel by Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from torch import Tensor

from bestiary.training.errors import InvalidRun, RoleLost
from bestiary.training.rl.buckets import BUCKET_BYTES, buckets
from bestiary.training.rl.groups import GRACE_S, Group, Members
from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.versioned import Versioned
from bestiary.training.rl.weight_sync import Answered, Shapes, SyncFailed


@dataclass(frozen=True)
class EngineFacts:
    """Of the engine in a rollout process.

    Attributes:
        kind: its class.   shapes, dtype: see `WeightReceiver`.   context: positions of a prompt and its answer.
    """

    kind: str
    shapes: Shapes
    dtype: torch.dtype
    context: int


class RemoteEngine(Versioned):
    """A `WeightReceiver` over the processes of a rollout group, each with an engine of the same checkpoint.

    It travels: a policy in other processes sends its weights from there, each bucket once into the object store, from
    where all engines read it. Prompts are spread over the engines, and equal ones stay together.

    Args:
        members: the processes.   facts: of their engines, which are alike.
        bucket_bytes: that are on their way at a time, twice.

    Attributes:
        answered: see `WeightReceiver`.
    """

    def __init__(self, members: Members, facts: Sequence[EngineFacts], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        other = next((one for one in facts if one != facts[0]), None)
        if other is not None:
            raise InvalidRun(
                f"rollout engines that differ: {facts[0].kind} in {facts[0].dtype} of {len(facts[0].shapes)} tensors, "
                f"{other.kind} in {other.dtype} of {len(other.shapes)}.",
                remedy="one checkpoint and one dtype for all of them",
            )
        self.members, self.facts, self.bucket_bytes = members, facts[0], bucket_bytes
        self.shapes, self.dtype, self.context = facts[0].shapes, facts[0].dtype, facts[0].context
        self.answered: Answered | None = None
        super().__init__(None)

    def synced(self, version: int | None, answered: Answered | None = None) -> None:
        """What a sync that was made elsewhere came to; None: nothing, or an engine is new."""
        self._version = version
        if version is not None:
            self.answered = answered

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            RoleLost: a process died, or did not answer in time.
        """
        names: Sequence[object] = range(len(prompts)) if keys is None else keys
        places: dict[int, list[int]] = {}
        homes: dict[tuple[int, ...], int] = {}
        for place, prompt in enumerate(prompts):
            home = homes.setdefault(tuple(prompt), len(homes) % len(self.members))
            places.setdefault(home, []).append(place)
        asked = {
            member: self.members.ask(
                member, "generate", [prompts[place] for place in chosen], sampling, [names[place] for place in chosen]
            )
            for member, chosen in places.items()
        }
        found: dict[tuple[int, int], Rollout] = {}
        answers = self.members.wait(list(asked.values()), members=list(asked))
        for member, said in zip(asked, answers, strict=True):
            for number, one in enumerate(said):
                place = places[member][one.prompt]
                found[place, number % sampling.n] = replace(one, prompt=place)
        return [found[place, number] for place in range(len(prompts)) for number in range(sampling.n)]

    def alone(self, member: int) -> MemberEngine:
        """One of the engines, for whoever plays with it alone."""
        return MemberEngine(self, member)

    # ------------------------------------------------------------------ weights

    def receive(self, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """See `WeightReceiver`. While one bucket is taken in, the next one is gathered.

        Raises:
            RoleLost: a process died.
        """
        self._version = None
        self.members.every("open_stream")
        try:
            return self._sent(tensors)
        except Exception:
            with suppress(RoleLost):  # one that hangs is not waited for: it may be why
                self.members.every("drop_stream", timeout_s=min(GRACE_S, self.members.timeout_s / 4))
            raise

    def _sent(self, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        members = self.members
        waiting: list[object] = []
        count = 0
        for bucket in buckets(((name, self._narrowed(tensor)) for name, tensor in tensors), self.bucket_bytes):
            reference = ray.put(bucket)
            sent = [members.ask(member, "take_bucket", count, reference) for member in range(len(members))]
            members.wait(waiting)
            waiting, count = list(sent), count + 1
        members.wait(waiting)
        return sorted({name for told in members.every("close_stream", count) for name in told})

    def _narrowed(self, tensor: Tensor) -> Tensor:
        """In the engine's dtype, where that has fewer bytes to send."""
        return tensor.to(self.dtype) if self.dtype.itemsize < tensor.element_size() else tensor

    def held(self, name: str) -> Tensor | None:
        """See `WeightReceiver`; of the first engine."""
        found: Tensor | None = self.members.answer(0, "held", name)
        return found

    def checksums(self) -> Mapping[str, int]:
        """See `weight_sync.Checksums`.

        Raises:
            SyncFailed: two engines hold different values.
        """
        told: list[Mapping[str, int]] = self.members.every("checksums")
        for member, one in enumerate(told):
            name = next((name for name in told[0] if one.get(name) != told[0][name]), None)
            if name is not None:
                raise SyncFailed(
                    f"tensor {name} is not the same in rollout engines 0 and {member}.",
                    remedy="sync again; if it happens again, start the engines anew",
                )
        return told[0]

    def probe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See `WeightReceiver`; the answers of every engine, one engine after the other."""
        return [one for said in self.members.every("probe", prompts, sampling) for one in said]

    def accept(self, version: int) -> None:
        """See `WeightReceiver`."""
        self.members.every("accept", version)
        self._version = version

    def close(self) -> None:
        """Nothing here: whoever started the processes ends them."""
        self._version = None


class RolloutGroup(RemoteEngine):
    """The same where its processes were started, with `roles.Restarts`.

    Args:
        group: of `RolloutWorker`.
    """

    def __init__(self, group: Group, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(group.members, group.described, bucket_bytes=bucket_bytes)
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        """Elsewhere it is an engine whose processes are another's to start.

        Who asks from there is waited for as long: an engine that hangs is told before it seems that he does.
        """
        members = replace(self.members, timeout_s=self.members.timeout_s / 2)
        return _elsewhere, (members, self.facts, self.bucket_bytes, self._version, self.answered)

    def restart(self) -> None:
        """See `roles.Restarts`: new engines in place of dead ones; together they have no weights until a sync."""
        if self.group.restart():
            self.members = self.group.members
            self.synced(None)

    def close(self) -> None:
        """End the processes."""
        super().close()
        self.group.close()


def _elsewhere(
    members: Members, facts: EngineFacts, bucket_bytes: int, version: int | None, answered: Answered | None
) -> RemoteEngine:
    made = RemoteEngine(members, [facts], bucket_bytes=bucket_bytes)
    made.answered = answered
    made.synced(version, answered)
    return made


class MemberEngine:
    """One engine of a `RemoteEngine`, as a `RolloutEngine`.

    Its version is that of all; each answer says which weights wrote it.
    """

    def __init__(self, whole: RemoteEngine, member: int) -> None:
        self._whole, self._member = whole, member

    @property
    def version(self) -> int:
        """See `RemoteEngine`."""
        return self._whole.version

    @version.setter
    def version(self, value: int) -> None:
        self._whole.version = value

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RemoteEngine`."""
        found: list[Rollout] = self._whole.members.answer(self._member, "generate", list(prompts), sampling, keys)
        return found

    def close(self) -> None:
        """Nothing here."""
