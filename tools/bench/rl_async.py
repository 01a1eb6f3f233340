"""What sampling ahead is worth where environments wait: `bestiary grpo` with bounded staleness against without.

    ours          loop.staleness = 2: up to two rounds of prompts are played while a round is trained
    synchronous   loop.staleness = 0: a round is played, then trained, with as many threads for its environments

A small Qwen3 plays episodes of two turns. The environment waits in each: seconds from a bounded Pareto distribution
between 0.05 and 2, a function of the prompt's name and the turn, so both arms wait for the same prompts equally long.
Seconds are those from the first round's first prompt to the last round's last figure, for as many prompts. Answers
older than two rounds end a run with an error; how old the oldest one was is a goal as well.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.tools.bench import compare, measure
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.rollout import seed_of

if TYPE_CHECKING:
    from bestiary.training.rl.roles import Prompt
    from bestiary.training.tracking import RunInfo

STALENESS = 2
TURNS = 2
SHORTEST_S, LONGEST_S = 0.05, 2.0
THREADS = 32  # of environments: as many as a round has episodes
PROMPTS, ANSWERS = 8, 4  # of a round
ROUNDS = 12

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.rl_async
  python -m bestiary.tools.bench.rl_async --rounds 5 --json out/bench-rl-async.json

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def latency(seed: int, turn: int) -> float:
    """Seconds that an environment waits: Pareto with exponent 1, cut at both ends."""
    share = seed_of(seed, turn) / 2**63
    return min(SHORTEST_S / max(1.0 - share, 1e-9), LONGEST_S)


class Waiting:
    """An `Environment` that waits and says nothing of interest.

    Args:
        pace: factor of all latencies.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self._pace, self._seed = pace, 0

    def reset(self, prompt: Prompt, *, seed: int) -> tuple[int, ...]:
        """See `Environment`."""
        self._seed = seed
        return prompt.ids

    def step(self, said: Said) -> Heard:
        """See `Environment`: waits; the reward is the share of odd ids."""
        time.sleep(self._pace * latency(self._seed, said.turn))
        odd = sum(word % 2 for word in said.ids) / (TURNS * len(said.ids))
        return Heard(ids=(2,), done=said.turn + 1 == TURNS, rewards={"odd": odd})

    def cut_off(self) -> Mapping[str, float | None]:
        """See `Environment`."""
        return {}

    def close(self) -> None:
        """See `Environment`."""


class Clock:
    """A tracker that keeps when rounds ended, and how old their answers were."""

    def __init__(self) -> None:
        self.seconds = self.prompts = self.staleness = 0.0
        self._begun = 0.0

    def start(self, run: RunInfo) -> None:
        """The first prompts are about to be put."""
        self._begun = time.perf_counter()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A round is over."""
        self.seconds = time.perf_counter() - self._begun
        self.prompts += values["rl/prompts"]
        self.staleness = max(self.staleness, values["rl/staleness_max"])

    def close(self) -> None:
        """Nothing is left."""


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """One: with and without sampling ahead."""
    steps = 3 if quick else ROUNDS
    common: dict[str, Any] = {"folder": str(folder), "steps": steps, "pace": 0.02 if quick else 1.0}
    needs = ("pyarrow", "fsspec", "PyYAML")
    return [
        compare.Case(
            name="environments that wait",
            arms={
                "ours": compare.Arm(job={**common, "staleness": STALENESS}, needs=needs),
                "synchronous": compare.Arm(job={**common, "staleness": 0}, needs=needs),
            },
            tokens=steps * PROMPTS,
            note="tok/s are trained prompts per second here.",
        )
    ]


def prepare(folder: Path, quick: bool) -> None:
    """Prompts, and a model with its tokenizer."""
    from bestiary.tools.demo_rl_sorting import Sorting

    Sorting(demonstrations=1, prompts=ROUNDS * PROMPTS, held_out=1, hidden=64, layers=2).write(folder, 0)


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: a run of so many rounds."""
    from bestiary.training.rl.config import GrpoConfig
    from bestiary.training.rl.grpo import run

    clock, folder = Clock(), Path(job["folder"])
    with tempfile.TemporaryDirectory(prefix="bestiary-bench-rl-") as out:
        base = str(folder / "random")
        content = {
            "model": {"src": base},
            "data": {
                "tokenizer": {"src": base},
                "sources": [{"name": "digits", "files": str(folder / "prompts.jsonl"), "kind": "completion"}],
                "pack_length": 64,
            },
            "environment": {"name": f"{__spec__.name}:Waiting", "options": {"pace": job["pace"]}, "threads": THREADS},
            "rollouts": {"max_tokens": 8, "n": ANSWERS},
            "optim": {"lr": 1e-4},
            "loop": {"steps": job["steps"], "prompts": PROMPTS, "staleness": job["staleness"]},
            "checkpoint": {"every": None, "export": False},
            "out": out,
        }
        run(GrpoConfig.model_validate(content), also=(clock,))
    return {
        "seconds": clock.seconds,
        "prompts_per_s": clock.prompts / clock.seconds,
        "staleness": clock.staleness,
        "check": clock.prompts,
    }


BENCH = compare.Bench(
    name="rl_async",
    about=__doc__,
    example=EXAMPLE,
    cases=cases,
    work=work,
    packages=("torch", "bestiary"),
    prepare=prepare,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
