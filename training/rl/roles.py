"""Who does what in reinforcement learning, as the controller sees it; where a role lives is the launcher's business.

A role is an object. In one process it is the object that does the work; on Ray it is a proxy of a group of actors with
the same methods. Both may be asked from any thread. A role whose process died says so with `RoleLost`: the controller
restarts it, gives it what it lost, and asks again. All that is asked is an answer to ids and versions, so asking twice
does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bestiary.training.rl.packing import Column
from bestiary.training.rl.prompt import Prompt as Prompt
from bestiary.training.rl.records import Experience, Trajectory
from bestiary.training.rl.rollout import Rollout, RolloutEngine, Sampling
from bestiary.training.rl.weight_sync import Synced

Figures = Mapping[str, float]


class Sampler(Protocol):
    """Plays prompts against an environment with a rollout engine; what comes out are whole groups.

    `extra` of a trajectory has `row`, the prompt's, which rewards read; `turns`; `sample_s` and `environment_s`, the
    seconds of each; `failed`, an error's text, where an environment's error ended it; and what the environment said.

    Attributes:
        engine: whose answers they are; `Policy.sync` puts weights into it.
    """

    engine: RolloutEngine

    def put(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Start `sampling.n` episodes of each; returns at once. The seed of an episode is made of `sampling.seed`,
        the prompt's name, the number of the answer and the turn."""
        ...

    def take(self, at_least: int) -> list[list[Trajectory]]:
        """Groups that are complete, in the order they were completed; waits until there are so many.

        Raises:
            RoleLost: the engine's or the environment's process died; what was in flight stays in flight and is played
                again once the role is restarted and the engine has weights.
            EnvironmentFailed: more episodes were ended by an error or the timeout of their environment than the run
                allows; below that they come with `extra["failed"]` and no rewards.
            InvalidRun: fewer are in flight; a prompt that leaves no room for an answer.
        """
        ...

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Names of the prompts put and not taken, the oldest first."""
        ...

    def pause(self) -> None:
        """Returns once no answer is being sampled, and none begins until `resume`; environments go on."""
        ...

    def resume(self) -> None:
        """Sample again, also after an error of the engine, whose unfinished answers are asked for anew."""
        ...

    def close(self) -> None:
        """Let go of everything, what is in flight included."""
        ...


class Scorer(Protocol):
    """Judges answers."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same, in the same order, with `rewards` of every function added to those they have.

        Raises:
            RewardFailed: more functions raised, hung or said NaN than the run allows; below that an answer has None.
        """
        ...

    def figures(self) -> Figures:
        """What was counted since the last call: reward/errors, reward/timeouts, reward/nan."""
        ...


class Frozen(Protocol):
    """A model that only computes: the reference, a teacher."""

    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """`packing.with_log_probs` under its weights."""
        ...


class Policy(Frozen, Protocol):
    """The model that trains, and the four primitives of a loop.

    Attributes:
        version: optimiser steps behind its weights.
    """

    version: int

    def forward_backward(self, experiences: Sequence[Experience]) -> Figures:
        """Add their gradients to those since the last `optim_step`; figures of these experiences, as means per unit."""
        ...

    def optim_step(self) -> Figures:
        """Divide by the units of all `forward_backward` since the last one, clip, update; one version more.

        Figures: grad_norm, lr, skipped.
        Raises:
            Diverged: not finite, and the run does not skip.
        """
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """Answers by its own weights, whatever engine the run has."""
        ...

    def sync(self, engine: RolloutEngine) -> Synced:
        """`weight_sync.sync` of its weights and version."""
        ...

    def check(self, trajectories: Sequence[Trajectory]) -> Figures:
        """`rollout_check.check_rollouts` of those sampled by this version, and the parity of all, as rl/mismatch_…."""
        ...

    def save_state(self, controller: Mapping[str, Any], *, wait: bool = False) -> None:
        """A resume point, atomic: weights, optimiser, generators, the names of the prompts trained on, and what the
        controller says of itself."""
        ...

    def load_state(self) -> Mapping[str, Any] | None:
        """Go back to the newest resume point; what the controller said of itself, or None where there is none."""
        ...

    def trained(self) -> Mapping[str, int]:
        """Names of all prompts whose experiences went into an optimiser step, and in how many: of the weights as they
        are, resume points included."""
        ...

    def export(self, folder: Path) -> None:
        """Weights in Hugging Face's layout, with the tokenizer."""
        ...


@runtime_checkable
class Restarts(Protocol):
    """A role in processes of its own."""

    def restart(self) -> None:
        """New processes in place of dead ones. A policy then has the weights of the run's beginning, an engine none."""
        ...
