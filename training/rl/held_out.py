"""What the policy is worth on prompts that it is never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bestiary.training.rl.assess import reward_figures
from bestiary.training.rl.records import Trajectory
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Sampling


@dataclass
class HeldOut:
    """Prompts that are answered between two rounds, with the same seeds at every pass.

    Attributes:
        prompts: the same at every pass.   sampling: of a round; `n` of it is overridden.
        every: rounds; the last round has one in any case.   n: answers to each.   weights: of rewards, as of a round.
        at_start: a pass before the first round too.
        patience: passes without a better reward after which the run ends; None: never.
        best: reward, or None before the first.   worse: passes since.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    every: int
    n: int = 1
    weights: Mapping[str, float] | None = None
    at_start: bool = False
    patience: int | None = None
    best: float | None = field(default=None, init=False)
    worse: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # A name of their own, and with it seeds of their own, should a row be trained on as well.
        renamed = [replace(one, prompt_id=f"held out: {one.prompt_id}") for one in self.prompts]
        self.by_name: dict[str, Prompt] = {one.prompt_id: one for one in renamed}
        self.sampling = replace(self.sampling, n=self.n)

    def due(self, made: int, *, last: bool) -> bool:
        """Whether a pass follows so many rounds."""
        return self.at_start if made == 0 else last or made % self.every == 0

    def figures(self, scored: Sequence[Trajectory]) -> dict[str, float]:
        """eval/reward, eval/reward_std, eval/reward/NAME, eval/unscored, eval/cut_off, eval/answer_tokens of a pass."""
        found = reward_figures(scored, weights=self.weights)
        return {f"eval/{name}": value for name, value in found.items() if name != "equal_groups"}

    def judge(self, figures: Mapping[str, float]) -> str | None:
        """Remember a pass; why the run ends with it, or None. One without any reward says nothing."""
        reward = figures["eval/reward"]
        if figures["eval/unscored"] == 1.0:
            return None
        if self.best is None or reward > self.best:
            self.best, self.worse = reward, 0
            return None
        self.worse += 1
        return self.enough()

    def enough(self) -> str | None:
        """Why the run ends by what is remembered, also of one that is started again; None: it goes on."""
        if self.patience is None or self.worse < self.patience:
            return None
        return f"no better held-out reward than {self.best:.4g} in {self.worse}"

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"best": self.best, "worse": self.worse}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """What `state` gave; None: nothing yet."""
        self.best, self.worse = (None, 0) if state is None else (state["best"], state["worse"])
