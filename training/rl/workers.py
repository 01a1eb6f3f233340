"""What the processes of each role host, and what they can be asked: the in-process object of the role, called there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.elsewhere import Question
from bestiary.training.rl.buckets import Bucket, buckets
from bestiary.training.rl.environments import Environment, EnvironmentFactory, Heard, Said
from bestiary.training.rl.groups import RoleWorker, everybody, shares
from bestiary.training.rl.inflow import Inflow
from bestiary.training.rl.packing import Column
from bestiary.training.rl.policy import LocalPolicy
from bestiary.training.rl.records import Experience, Trajectory
from bestiary.training.rl.remote_engine import EngineFacts
from bestiary.training.rl.roles import Figures, Frozen, Prompt, Scorer
from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.shared_engine import SharedEngine
from bestiary.training.rl.teacher import LocalTeacher, TeacherFacts
from bestiary.training.rl.weight_sync import (
    Answered,
    Checksums,
    Synced,
    SyncFailed,
    WeightReceiver,
    checksum_of,
    takes_weights,
)

# ---------------------------------------------------------------------- models that compute


class FrozenWorker(RoleWorker):
    """Hosts a `Frozen`: a reference."""

    hosted: Frozen

    @shares
    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """See `Frozen`; of the share that this process was given."""
        with self.failing():
            return self.hosted.log_probs(experiences, column)


class TeacherWorker(RoleWorker):
    """Hosts a `LocalTeacher`; its answers leave in parts of bounded size."""

    hosted: LocalTeacher

    def describe(self) -> TeacherFacts:
        """Of its head; a place for answers is made."""
        self._answers: dict[int, Iterator[Bucket]] = {}
        self._first = 0
        return self.hosted.facts

    def say(self, ticket: int, question: Question | None, most: int) -> None:
        """Find the answer to a question, or with None the weight of its head, and keep it to be taken in parts.

        Args:
            ticket: what `part` calls it.   most: bytes of a part.
        """
        with self.failing():
            found = self.hosted.head() if question is None else self.hosted.said(question)
        if ticket >= self._first:
            self._answers[ticket] = buckets(found.items(), most)

    def part(self, ticket: int) -> Bucket | None:
        """The next part of an answer; None: that was all of it."""
        found = next(self._answers[ticket], None)
        if found is None:
            del self._answers[ticket]
        return found

    def forget(self, first: int) -> None:
        """Let go of all answers whose ticket is lower."""
        self._first = first
        for ticket in [one for one in self._answers if one < first]:
            self._answers.pop(ticket, None)


@dataclass(frozen=True)
class PolicyFacts:
    """Of one rank of a policy.

    Attributes:
        version: see `Policy`.   part: of what is trained on, that it is given.   vocabulary: of its model.
    """

    version: int
    part: int
    vocabulary: int


class PolicyWorker(RoleWorker):
    """Hosts a `LocalPolicy`: one rank of it, whose calls all ranks make together."""

    hosted: LocalPolicy

    def describe(self) -> PolicyFacts:
        """Its version and place; ranks of one tensor group are given the same."""
        policy = self.hosted
        return PolicyFacts(policy.version, policy.trainer.data_rank, policy.model.decoder_config.vocab_size)

    @shares
    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """See `Frozen`; of the share that this rank was given."""
        with self.failing():
            return self.hosted.log_probs(experiences, column)

    @shares
    def forward_backward(self, experiences: Sequence[Experience]) -> Figures:
        """See `Policy`; of the share that this rank was given."""
        with self.failing():
            return self.hosted.forward_backward(experiences)

    @everybody
    def optim_step(self) -> tuple[Figures, int]:
        """See `Policy`; and the version that it made."""
        with self.failing():
            return self.hosted.optim_step(), self.hosted.version

    @shares
    def sample(self, share: Sequence[tuple[Sequence[int], object]], sampling: Sampling) -> list[list[Rollout]]:
        """See `Policy`; the answers to each prompt, of those with their names that this rank was given."""
        with self.failing():
            said = self.hosted.sample([prompt for prompt, _ in share], sampling, keys=[name for _, name in share])
        return [said[start : start + sampling.n] for start in range(0, len(said), sampling.n)]

    @everybody
    def sync(self, engine: WeightReceiver) -> tuple[Synced, Answered | None]:
        """See `Policy`. The first rank alone talks to the engine."""
        with self.failing():
            shared = SharedEngine(engine)
            return self.hosted.sync(shared), shared.answered

    @shares
    def check(self, trajectories: Sequence[Trajectory]) -> Figures:
        """See `Policy`; of the share that this rank was given, and figures of all."""
        with self.failing():
            return self.hosted.check(trajectories)

    @everybody
    def save_state(self, controller: Mapping[str, Any], wait: bool) -> None:
        """See `Policy`."""
        with self.failing():
            self.hosted.save_state(controller, wait=wait)

    @everybody
    def finish(self) -> None:
        """See `LocalPolicy.close`."""
        self.hosted.close()

    @everybody
    def load_state(self) -> tuple[Mapping[str, Any] | None, int]:
        """See `Policy`; and the version that it brought."""
        with self.failing():
            return self.hosted.load_state(), self.hosted.version

    @everybody
    def trained(self) -> Mapping[str, int]:
        """See `Policy`."""
        return self.hosted.trained()

    @everybody
    def export(self, folder: Path) -> None:
        """See `Policy`."""
        with self.failing():
            self.hosted.export(folder)


# ---------------------------------------------------------------------- judging and answering


class RewardWorker(RoleWorker):
    """Hosts a `Scorer`."""

    hosted: Scorer

    @shares
    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `Scorer`; of the share that this process was given."""
        return self.hosted.score(trajectories)

    @everybody
    def figures(self) -> Figures:
        """See `Scorer`."""
        return self.hosted.figures()


class EnvironmentWorker(RoleWorker):
    """Hosts an `EnvironmentFactory`, and the environments of the episodes that are being played."""

    hosted: EnvironmentFactory

    def describe(self) -> None:
        """Nothing; a place for environments is made."""
        self._playing: dict[str, Environment] = {}

    def reset(self, episode: str, prompt: Prompt, seed: int) -> Sequence[int]:
        """See `Environment`; of an episode that has a new one from here on."""
        self.end(episode)
        self._playing[episode] = self.hosted()
        return self._playing[episode].reset(prompt, seed=seed)

    def step(self, episode: str, said: Said) -> Heard:
        """See `Environment`."""
        return self._playing[episode].step(said)

    def cut_off(self, episode: str) -> Mapping[str, float | None]:
        """See `Environment`."""
        return self._playing[episode].cut_off()

    def end(self, episode: str) -> None:
        """`Environment.close`; of an episode that has none, nothing."""
        environment = self._playing.pop(episode, None)
        if environment is not None:
            environment.close()


# ---------------------------------------------------------------------- sampling


class RolloutWorker(RoleWorker):
    """Hosts an engine that takes weights; whoever plays episodes with it does so from where the controller is."""

    hosted: WeightReceiver
    _inflow: Inflow | None = None

    def __init__(self) -> None:
        super().__init__()
        self._sampling = threading.Lock()

    @everybody
    def ping(self) -> int:
        """See `RoleWorker`; once nothing is sampled or given up: one that hangs in that is to be replaced."""
        with self._sampling:
            return os.getpid()

    def describe(self) -> EngineFacts:
        """Of its engine.

        Raises:
            InvalidRun: one that takes no weights: nobody in this process trains.
        """
        engine: Any = self.hosted
        if not takes_weights(engine):
            raise InvalidRun(
                f"a rollout process with {type(engine).__name__}, which takes no weights.",
                remedy="rollouts.engine: standalone or vllm",
            )
        return EngineFacts(type(engine).__name__, dict(engine.shapes), engine.dtype, engine.context)

    def open_stream(self) -> None:
        """Begin to receive weights; what was being received is given up."""
        self.drop_stream()
        with self._sampling:  # to the end, by the weights that it began with
            self._inflow = Inflow(self.hosted, self._timeout_s)

    def drop_stream(self) -> None:
        """Give up what is being received: the engine has weights of no version then."""
        inflow, self._inflow = self._inflow, None
        if inflow is not None:
            with self._sampling:  # an engine that hangs in it is not alive either, see `ping`
                inflow.give_up()

    def take_bucket(self, number: int, bucket: Bucket) -> None:
        """See `Inflow.put`.

        Raises:
            SyncFailed: also where no stream is open.
        """
        self._receiving.put(number, bucket)

    def close_stream(self, buckets: int) -> list[str]:
        """See `Inflow.finish`."""
        inflow, self._inflow = self._receiving, None
        return inflow.finish(buckets)

    def checksums(self) -> Mapping[str, int]:
        """See `weight_sync.Checksums`."""
        engine = self.hosted
        if isinstance(engine, Checksums):
            return engine.checksums()
        held = {name: engine.held(name) for name in engine.shapes}
        return {name: checksum_of(tensor, engine.dtype) for name, tensor in held.items() if tensor is not None}

    def held(self, name: str) -> Tensor | None:
        """See `WeightReceiver`."""
        found = self.hosted.held(name)
        return None if found is None else found.detach().to("cpu").clone()

    def probe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See `WeightReceiver`."""
        with self._sampling:
            return self.hosted.probe(prompts, sampling)

    def accept(self, version: int) -> None:
        """See `WeightReceiver`."""
        self.hosted.accept(version)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[object] | None
    ) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            SyncFailed: also while weights come.
        """
        with self._sampling:
            if self._inflow is not None:
                raise SyncFailed("this engine is being synced.", remedy="ask again when it has its weights")
            return self.hosted.generate(prompts, sampling, keys=keys)

    @property
    def _receiving(self) -> Inflow:
        if self._inflow is None:
            raise SyncFailed("tensors for an engine that no sync was begun with.", remedy="sync again")
        return self._inflow
