"""A controller at toy size: one answer an episode, the share of even ids as the reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import ismethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestiary.models import Decoder
from bestiary.training.errors import RoleLost
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.controller import Controller
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.held_out import HeldOut
from bestiary.training.rl.policy import LocalFrozen, LocalPolicy
from bestiary.training.rl.records import Trajectory
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rounds import Roles, Rounds

from ..small_run import Kept
from .small_policy import policy

SAMPLING = Sampling(max_tokens=5, temperature=0.8, n=4, seed=3)


class Answers:
    """A `Sampler` that answers when it is asked to give."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.flying, self.paused = engine, dict[str, Any](), False
        self.puts: list[tuple[int, str]] = []

    def put(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        for one in prompts:
            assert one.prompt_id not in self.flying
            self.puts.append((self.engine.version, one.prompt_id))
            self.flying[one.prompt_id] = (one, sampling)

    def take(self, at_least: int) -> list[list[Trajectory]]:
        assert not self.paused
        assert at_least <= len(self.flying)
        sampling = next(iter(self.flying.values()))[1]
        chosen = [one for one in self.flying.values() if one[1] == sampling]
        said = self.engine.generate([one.ids for one, _ in chosen], sampling, keys=[one.prompt_id for one, _ in chosen])
        for one, _ in chosen:
            del self.flying[one.prompt_id]
        groups = [said[place : place + sampling.n] for place in range(0, len(said), sampling.n)]
        return [
            [
                Trajectory.of(
                    rollout,
                    one.ids,
                    prompt_id=one.prompt_id,
                    group_id=one.prompt_id,
                    sample=number,
                    temperature=sampling.temperature,
                    extra={"row": dict(one.row)},
                )
                for number, rollout in enumerate(group)
            ]
            for (one, _), group in zip(chosen, groups, strict=True)
        ]

    @property
    def in_flight(self) -> tuple[str, ...]:
        return tuple(self.flying)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.flying.clear()


class Even:
    """A `Scorer`: the share of even ids of an answer, or what it is told to say."""

    def __init__(self, says: Any = None) -> None:
        self.says = says

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return [replace(one, rewards={"even": self._of(one)}) for one in trajectories]

    def _of(self, one: Trajectory) -> Any:
        if self.says is not None:
            return self.says(one)
        return float(np.mean(one.ids[one.sampled] % 2 == 0))

    def figures(self) -> dict[str, float]:
        return {"reward/errors": 0.0}


class Numbers:
    """A `PromptSource` of so many prompts."""

    def __init__(self, count: int = 1000) -> None:
        self.count, self.given = count, 0

    def next(self, count: int) -> list[Prompt]:
        places = range(self.given, min(self.given + count, self.count))
        self.given += len(places)
        return [
            Prompt(prompt_id=f"n{place}", ids=(3 + place, 17, *([5] * (place % 3))), row={"place": place})
            for place in places
        ]

    def state(self) -> Mapping[str, Any]:
        return {"given": self.given}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


class Deaths:
    """When the process of a role dies: in the calls given, method to their numbers."""

    def __init__(self, name: str, dies: Mapping[str, Sequence[int]]) -> None:
        self.name, self._dies, self._calls = name, dies, Counter[str]()
        self.dead, self.restarts = False, 0

    def pass_by(self, method: str) -> None:
        self._calls[method] += 1
        if self.dead or self._calls[method] in self._dies.get(method, ()):
            self.dead = True
            raise RoleLost(f"the {self.name} died in {method}", role=self.name)

    def restart(self) -> None:
        self.dead, self.restarts = False, self.restarts + 1


class Mortal:
    """A role whose process dies; restarted, it is a new one."""

    def __init__(self, make: Callable[[], Any], deaths: Deaths) -> None:
        self.make, self.role, self.deaths = make, make(), deaths

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.role, name)

        def asked(*args: Any, **more: Any) -> Any:
            self.deaths.pass_by(name)
            return found(*args, **more)

        return asked if ismethod(found) else found

    def restart(self) -> None:
        self.deaths.restart()
        if isinstance(self.role, LocalPolicy) and self.role._saver is not None:
            self.role._saver.join()  # where a process dies no thread writes beside the next one
        self.role = self.make()


class MortalEngine(EmbeddedEngine):
    """Whose process dies while it answers; a new one has no weights."""

    def __init__(self, model: Decoder, deaths: Deaths) -> None:
        super().__init__(model)
        self.deaths = deaths

    def generate(self, *args: Any, **more: Any) -> Any:
        self.deaths.pass_by("generate")
        return super().generate(*args, **more)

    def restart(self) -> None:
        self.deaths.restart()
        self.version = -1


def controller(
    out: Path | None = None,
    *,
    scorer: Any = None,
    algorithm: Any = None,
    source: Any = None,
    dies: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
    callbacks: Sequence[Any] = (),
    held_out: HeldOut | None = None,
    more: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Controller:
    """Three rounds of two prompts, with resume points in `out` after each. Roles in `dies` are mortal.

    Args:
        more: of the policy.   changes: of `Rounds`.
    """
    algorithm = named("grpo") if algorithm is None else algorithm
    deaths = {name: Deaths(name, when) for name, when in (dies or {}).items()}

    def fresh() -> LocalPolicy:
        made = policy(out, algorithm=algorithm, flat=True, rate=1e-3, **(more or {}))
        if "engine" in parts:
            parts["engine"].model = made.model  # whose weights it shares
        return made

    parts: dict[str, Any] = {}
    first: Any = Mortal(fresh, deaths["policy"]) if "policy" in deaths else fresh()
    parts["engine"] = (
        MortalEngine(first.model, deaths["rollout"]) if "rollout" in deaths else EmbeddedEngine(first.model)
    )
    reference: Any = None
    if algorithm.objective.kl_coef:
        frozen = policy(flat=True)
        reference = LocalFrozen(frozen.model, frozen.room)
        if "reference" in deaths:
            reference = Mortal(lambda: LocalFrozen(frozen.model, frozen.room), deaths["reference"])
    judge = scorer or Even()
    plan: dict[str, Any] = {"rounds": 3, "prompts": 2, "sampling": SAMPLING, "algorithm": algorithm, "save_every": 1}
    made = Controller(
        Roles(
            first,
            Answers(parts["engine"]),
            Mortal(lambda: judge, deaths["reward"]) if "reward" in deaths else judge,
            reference,
        ),
        source or Numbers(),
        Rounds(**(plan | changes)),
        held_out,
        log=Kept(),
        callbacks=callbacks,
    )
    made.deaths = deaths
    return made


def result(made: Controller) -> tuple[dict[str, torch.Tensor], Mapping[str, int]]:
    """Weights, and the names of the prompts trained."""
    return {name: value.detach().clone() for name, value in made.roles.policy.model.named_parameters()}, (
        made.roles.policy.trained()
    )
