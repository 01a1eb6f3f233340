"""What `make demo-rl` and `make demo-rl-real` share: a trial, how it is judged, what is printed and drawn of it.

Judged is the mean reward twice: on prompts that nothing was trained on, by answers sampled at temperature 1 as in
training, in the run's own passes before the first round and after the last; and in training, over the first rounds and
the last ones. Where a run ends as soon as it has learned enough (`Goal`), only the latter decides when.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools import assets
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.demo_steps import NUMERIC, LineWatcher, StepFailed
from bestiary.training.plot import draw, read_runs

if TYPE_CHECKING:
    from rich.console import Console

    from bestiary.training.rl.controller import Controller


Row = dict[str, str]

GAIN = 0.3  # in mean reward, that every seed has to reach by both measures
EDGE = 4  # rounds at either end of training that are compared
PLENTY = 0.45  # gain in training with which a run of a `Goal` ends
REWARD, GOAL = "bestiary.tools.demo_rl_rewards:right", "bestiary.tools.demo_rl_trial:Goal"
DEMONSTRATIONS, PROMPTS, HELD_OUT = "demonstrations.jsonl", "prompts.jsonl", "held-out.jsonl"


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What is learned, from what start.

    Attributes:
        title: of the table.   schema: of the JSON result.
        max_tokens: of an answer.   rows: answers sampled together.
        held_out: prompts that nothing is trained on.   judged: answers to each of them.
        rounds, round_prompts, answers, rate: of reinforcement learning; rounds: at most.
    """

    title: str
    schema: str
    max_tokens: int
    held_out: int
    rounds: int
    round_prompts: int
    answers: int
    rate: float
    judged: int = 4
    rows: int = 256

    @abstractmethod
    def write(self, folder: Path, seed: int) -> None:
        """Put the rows to imitate, to learn from and to judge by into `DEMONSTRATIONS`, `PROMPTS` and `HELD_OUT`."""

    @abstractmethod
    def imitation(self, folder: Path, out: Path, seed: int) -> dict[str, Any]:
        """The file of the warm start, a `RunConfig`.

        Args:
            folder: that `write` wrote to.   out: of the run.
        """

    @abstractmethod
    def learning(self, base: Path, folder: Path, seed: int) -> dict[str, Any]:
        """The file of reinforcement learning in `folder`, a `GrpoConfig`: `common` and what is the task's own.

        Args:
            base: what the warm start exported.
        """

    def common(self, folder: Path, seed: int) -> dict[str, Any]:
        """What both tasks' files of reinforcement learning have."""
        source = {"name": "held-out", "files": str(folder / HELD_OUT), "kind": "completion"}
        return {
            "recipe": "grpo",
            "rollouts": {"max_tokens": self.max_tokens, "n": self.answers, "seed": seed, "rows": self.rows},
            "rewards": {"functions": [{"name": "right", "function": REWARD}]},
            "optim": {"lr": self.rate},
            "loop": {
                "steps": self.rounds,
                "prompts": self.round_prompts,
                "seed": seed,
                "evaluation": {
                    "sources": [source],
                    "prompts": self.held_out,
                    "n": self.judged,
                    "every": self.rounds,
                },
            },
            "checkpoint": {"every": None},
            "out": str(folder),
        }


class Goal:
    """A callback that ends a run whose mean reward in training has risen by `PLENTY`.

    It looks at training alone, so what is judged on held-out prompts had no part in it.
    """

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_step(self, controller: Controller, values: Mapping[str, float]) -> None:
        """See `controller.Callback`."""
        self.rewards.append(values["rl/reward"])
        first, last = ends(self.rewards)
        if len(self.rewards) >= 2 * EDGE and last - first >= PLENTY:
            controller.stopped = f"the reward in training rose from {first:.2f} to {last:.2f}"


def ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean of the first `EDGE` rewards and of the last."""
    few = min(EDGE, len(rewards))
    return sum(rewards[:few]) / few, sum(rewards[-few:]) / few


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One seed's course.

    Attributes:
        seed: of data, weights and sampling.
        before, after: mean reward on held-out prompts.   first, last: in the first and last `EDGE` rounds.
        rounds: made.   mismatch: the largest mean difference of log-probabilities of engine and policy in a round.
        seconds: of all of it.   training_s: of the rounds alone.
        folder: of the run; `bestiary grpo FOLDER/config.yaml out=…` repeats it.
    """

    seed: int
    before: float
    after: float
    first: float
    last: float
    rounds: int
    mismatch: float
    seconds: float
    training_s: float
    folder: str

    @property
    def holds(self) -> bool:
        """Whether it earns more than before, by both measures."""
        return min(self.after - self.before, self.last - self.first) >= GAIN

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return (
            asdict(self)
            | {"gain": self.after - self.before, "training_gain": self.last - self.first}
            | {"holds": self.holds}
        )


class Watcher(LineWatcher):
    """A tracker that shows each step in a line, and keeps rewards, those on held-out prompts too, and mismatches.

    Args:
        describe: is given the line.
    """

    def __init__(self, describe: Callable[[str], None]) -> None:
        super().__init__(describe)
        self.rewards: list[float] = []
        self.held_out: list[float] = []
        self.mismatches: list[float] = []
        self.seconds = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show and keep."""
        if "eval/reward" in values:
            self.held_out.append(values["eval/reward"])
            self.describe(f"reward {self.held_out[-1]:.2f} on held-out prompts")
        elif "rl/reward" in values:
            self.rewards.append(values["rl/reward"])
            self.mismatches.append(values["rl/mismatch_mean"])
            self.seconds += values["rl/round_s"]
            self.describe(f"round {len(self.rewards)}, reward {self.rewards[-1]:.2f}")
        else:
            self.describe(f"step {step}/{self.steps}, loss {values.get('loss', 0.0):.3f}")


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trial(task: Task, out: Path, seed: int, describe: Callable[[str], None]) -> Trial:
    """One seed, from its start to what it learned; folders of results are written anew.

    Raises:
        StepFailed: a run did not reach its end.
    """
    from bestiary.training.config import RunConfig
    from bestiary.training.rl.config import GrpoConfig
    from bestiary.training.rl.grpo import run as learn
    from bestiary.training.run import run

    begun = time.perf_counter()
    folder = (out / f"seed-{seed}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task.write(folder, seed)
    watcher = Watcher(describe)
    imitated = run(
        RunConfig.model_validate(task.imitation(folder, folder / "imitation", seed)),
        also=(watcher,),
    )
    if imitated.export is None:
        raise StepFailed(f"the imitation ended at step {imitated.step} of {imitated.steps}: {imitated.stopped}.")
    describe("judging answers to held-out prompts")
    learned = learn(GrpoConfig.model_validate(task.learning(imitated.export, folder, seed)), also=(watcher,))
    if learned.export is None or len(watcher.held_out) != 2:
        raise StepFailed(f"the run ended at round {learned.round} of {learned.rounds}: {learned.stopped}.")
    before, after = watcher.held_out
    first, last = ends(watcher.rewards)
    return Trial(
        seed=seed,
        before=before,
        after=after,
        first=first,
        last=last,
        rounds=learned.round,
        mismatch=max(watcher.mismatches),
        seconds=time.perf_counter() - begun,
        training_s=watcher.seconds,
        folder=str(folder),
    )


def parser_of(module: str, text: str | None, examples: str, folder: str) -> Parser:
    """The command line of a demo.

    Args:
        module, text: its name and its help.   folder: of results, by default below `out` of the checkout.
    """
    parser = Parser(module, text, examples)
    about = f"folder of results (default: out/{folder} of the checkout)"
    parser.add_argument("--out", type=Path, default=assets.output_folder() / folder, help=about)
    parser.add_argument("--seeds", type=at_least(1), default=3, help="how many, from 0 (default %(default)s)")
    return parser


def conduct(task: Task, out: Path, seeds: int, target: str | None) -> int:
    """A trial a seed, their table and curves; returns the exit code: 1 unless every seed holds.

    Args:
        out: folder of results.   target: where the JSON result goes, as `write_json` takes it.
    """
    from rich.console import Console

    logging.getLogger("bestiary").setLevel(logging.ERROR)
    shown, begun = Console(stderr=True), time.perf_counter()
    made: list[Trial] = []
    code, error, picture = 0, None, None
    try:
        for seed in range(seeds):
            with shown.status("") as status:

                def describe(line: str, seed: int = seed, status: Any = status) -> None:
                    status.update(f"seed {seed}: {line}")

                made.append(trial(task, out, seed, describe))
            shown.print(_line(made[-1]), highlight=False, soft_wrap=True)
        picture = out / "rewards.png"
        draw(read_runs([Path(one.folder) for one in made]), picture)
    except BestiaryError as caught:
        code, error = caught.exit_code, f"{type(caught).__name__}: {caught}"
    if not code and not all(one.holds for one in made):
        code = NUMERIC
    seconds = time.perf_counter() - begun
    if target != "-":
        console = Console()
        show(made, task.title, console)
        console.print(f"{seconds:.0f} s; {picture or out}", highlight=False, soft_wrap=True)
        missed = [str(one.seed) for one in made if not one.holds]
        if missed:
            console.print(f"gained less than {GAIN}: seed {', '.join(missed)}", highlight=False)
    if error is not None:
        print(error, file=sys.stderr)
    write_json(
        target,
        {
            "schema": task.schema,
            "exit_code": code,
            "error": error,
            "seconds": seconds,
            "trials": [one.as_json() for one in made],
            "picture": None if picture is None else str(picture),
        },
    )
    return code


def _line(one: Trial) -> str:
    return (
        f"seed {one.seed}: {one.before:.3f} → {one.after:.3f} on held-out prompts, {one.first:.3f} → {one.last:.3f} in "
        f"training, {one.rounds} rounds, {one.seconds:.0f} s"
    )


def show(trials: Sequence[Trial], title: str, console: Console) -> None:
    """The table: a row a seed."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("seed", "held-out", "in training", "mismatch", "s", ""):
        table.add_column(column, justify="right")
    for one in trials:
        ways = ((one.before, one.after), (one.first, one.last))
        table.add_row(
            str(one.seed),
            *(f"{start:.2f} → {end:.2f} ({end - start:+.2f})" for start, end in ways),
            f"{one.mismatch:.0e}",
            f"{one.seconds:.0f}",
            "ok" if one.holds else "MISSED",
        )
    console.print(table)
