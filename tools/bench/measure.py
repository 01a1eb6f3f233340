"""What every benchmark here shares: alternating arms, medians and spread, goals, and the verdict of a run.

A benchmark compares ours with the reference *in one run*, because a machine drifts by more than what is compared. The
arms alternate, every second round backwards; a control arm, in which nothing of either side runs, tells how far the
machine itself can be trusted.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

NOISE_LIMIT = 0.15  # of the control arm, (max − min) / median
GOALS_HOLD, GOAL_MISSED, TOO_NOISY = 0, 1, 5

Sample = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Repeated figures of one quantity; `spread` is (max − min) / median."""

    median: float
    low: float
    high: float
    spread: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Summary:
        """The summary of at least one figure."""
        middle = median(figures)
        spread = (max(figures) - min(figures)) / middle if middle else 0.0
        return cls(median=middle, low=min(figures), high=max(figures), spread=spread)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """`figure` must be at most `limit`, or at least, with `at_least`; `low` and `high` over the rounds, if known."""

    name: str
    figure: float
    limit: float
    at_least: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def holds(self) -> bool:
        """Whether it is."""
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    @property
    def missed_by(self) -> float:
        """Share of the limit that is missing, 0 where the goal holds (the figure itself where the limit is 0)."""
        if self.holds:
            return 0.0
        return abs(self.figure - self.limit) / abs(self.limit) if self.limit else self.figure


def alternate(
    arms: Mapping[str, Callable[[], Sample]],
    rounds: int,
    progress: Callable[[int, str, Sample], None] = lambda _round, _arm, _sample: None,
) -> dict[str, list[Sample]]:
    """Runs every arm once a round, every second round backwards.

    Args:
        arms: name to a function that measures once.
        rounds: at least 2.
        progress: called after each measurement.

    Returns:
        Samples by arm, in the order measured.
    """
    if rounds < 2:
        raise ValueError(f"rounds = {rounds}: one round says nothing about noise")
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for index in range(rounds):
        names = list(arms) if index % 2 == 0 else list(arms)[::-1]
        for name in names:
            samples[name].append(arms[name]())
            progress(index, name, samples[name][-1])
    return samples


def summarise(samples: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Summary]]:
    """Summaries by arm and quantity."""
    return {
        arm: {quantity: Summary.of([sample[quantity] for sample in taken]) for quantity in taken[0]}
        for arm, taken in samples.items()
    }


def exit_code(goals: Sequence[Goal], control: Summary) -> int:
    """5 if the control arm varied by more than `NOISE_LIMIT`, else 0 if every goal holds, else 1."""
    if control.spread > NOISE_LIMIT:
        return TOO_NOISY
    return GOALS_HOLD if all(goal.holds for goal in goals) else GOAL_MISSED


def versions(*packages: str) -> dict[str, str]:
    """Python, the machine and the packages, to print beside figures."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"python": platform.python_version(), "machine": machine} | {name: version(name) for name in packages}


def report(
    name: str,
    summaries: Mapping[str, Mapping[str, Summary]],
    goals: Sequence[Goal],
    code: int,
    **context: Any,
) -> dict[str, Any]:
    """The result as plain JSON values: `schema`, `exit_code`, `goals`, `arms`, and whatever `context` adds."""
    return {
        "schema": f"bestiary.bench.{name}/1",
        "exit_code": code,
        "goals": [asdict(goal) | {"holds": goal.holds, "missed_by": goal.missed_by} for goal in goals],
        "arms": {arm: {what: asdict(summary) for what, summary in rows.items()} for arm, rows in summaries.items()},
        **context,
    }


def print_goals(goals: Sequence[Goal], control: Summary, code: int) -> None:
    """Goals with their figures, by how much one is missed, the control arm's spread, and the exit code in words."""
    for goal in goals:
        sign = "≥" if goal.at_least else "≤"
        rounds = "" if goal.low is None or goal.high is None else f"  ({goal.low:.3f}–{goal.high:.3f})"
        short = "" if goal.holds else f"  by {goal.missed_by:.1%}"
        word = "holds " if goal.holds else "MISSED"
        print(f"  {word}  {goal.name:<58} {goal.figure:8.3f} {sign} {goal.limit:.3f}{rounds}{short}")
    print(
        f"control arm varies {control.spread:.1%} (limit {NOISE_LIMIT:.0%}): {in_words(code)}, exit {code}", flush=True
    )


def in_words(code: int) -> str:
    """What an exit code of a benchmark means."""
    return {GOALS_HOLD: "goals hold", GOAL_MISSED: "a goal is missed", TOO_NOISY: "too noisy to tell"}[code]
