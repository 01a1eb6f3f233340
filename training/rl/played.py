"""Figures of how episodes went, for the log of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bestiary.training.rl.records import Trajectory

_COUNTED = ("tool_calls", "tool_errors", "broken_calls")


def played(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What the samplers say of episodes, see `roles.Sampler`.

    Figures: turns (mean), environment_errors (episodes that an error of their environment ended), environment_s (mean
    seconds of an episode), and sums of tool_calls, tool_errors, broken_calls where there are tools. Nothing where every
    episode was one answer and its end.
    """
    turns = [one.extra["turns"] for one in trajectories if "turns" in one.extra]
    errors = sum("failed" in one.extra for one in trajectories)
    seconds = [one.extra["environment_s"] for one in trajectories if "environment_s" in one.extra]
    if not (errors or any(seconds)):
        return {}
    figures = {"turns": fmean(turns), "environment_errors": float(errors), "environment_s": fmean(seconds)}
    for name in _COUNTED:
        told = [one.extra[name] for one in trajectories if name in one.extra]
        if told:
            figures[name] = float(sum(told))
    return figures
