"""What a controller is given: who works for it, on what, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bestiary.training.rl.algorithms import Algorithm
from bestiary.training.rl.assess import Overlong
from bestiary.training.rl.roles import Frozen, Policy, Prompt, Sampler, Scorer
from bestiary.training.rl.rollout import Sampling


class PromptSource(Protocol):
    """Where prompts come from; `prompts.Prompts` reads them from the data pillar."""

    def next(self, count: int) -> list[Prompt]:
        """The next ones; fewer at the end of the data."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What leads behind the last one given, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken."""
        ...


@dataclass
class Roles:
    """Who works for the controller; where they live is no matter of his.

    Attributes:
        reference: None: the algorithm asks for none.
        shares: the engine computes in the policy's process, so nothing is sampled while the policy works. Otherwise
            sampling goes on, and pauses for a sync.
    """

    policy: Policy
    sampler: Sampler
    scorer: Scorer
    reference: Frozen | None = None
    shares: bool = True


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """A run as numbers.

    Attributes:
        rounds: of the whole run.   prompts: of a round.   sampling: of its answers.
        algorithm, weights, overlong: as `assess` takes them.
        updates: optimiser steps that the prompts of a round are divided over.   passes: over the prompts of a round.
        staleness: rounds that sampling may be ahead.
        save_every: rounds; None: at the end.   keep: a folder for the experiences of every round; None: they go.
        restarts: of one role in one round.
        refill: times that a round samples further prompts in place of those whose answers have equal rewards; what was
            sampled in vain is used up by the round.
    """

    rounds: int
    prompts: int
    sampling: Sampling
    algorithm: Algorithm
    weights: Mapping[str, float] | None = None
    overlong: Overlong | None = None
    updates: int = 1
    passes: int = 1
    staleness: int = 0
    save_every: int | None = None
    keep: Path | None = None
    restarts: int = 3
    refill: int = 0

    @property
    def steps(self) -> int:
        """Optimiser steps of a round."""
        return self.updates * self.passes
